# %% [markdown]
# # 01 · Memory math
#
# | In short | This notebook |
# |:--|:--|
# | **Time** | 115 minutes in two sittings (50 + 65), 65 more for optional parts |
# | **Needs** | any machine with 2 cores; no GPU |
# | **Core** | 1.1 to 1.3 in this sitting |
#
# The weights of Llama-2-7B take 13 GB in 16 bits, and an A100 has 85 GB. Yet training the model on
# one A100 runs out of memory. Where does the rest go? You write a formula for each
# kind, and compare it with real ranks.

# %% [markdown]
# <details><summary>On one GPU</summary>
#
# With one GPU, two ranks share it and communicate through gloo. Per-rank memory is the same as on a
# node, except for NCCL's own buffers: NCCL then has a single rank.
#
# </details>

# %% [markdown]
# ## You will be able to
#
# - count a model's parameters exactly from its configuration;
# - say how many bytes per parameter a recipe needs, and how many bytes each rank holds under ZeRO-1,
#   -2 and -3;
# - say which memory mixed precision halves.

# %% [markdown]
# ## Model configurations
#
# A **configuration** lists a model's sizes. All other numbers follow from them. Below, `m` stands
# for one column of the table, for example `m.hidden`.
#
# In this workbook a GB is 10⁹ bytes. A GiB is 2³⁰ bytes, which is 7 % more. An "80 GB" A100 has
# 80 GiB. The driver uses some of it, so CUDA reports 79.25 GiB, or 85.1 GB. All our charts use this
# number as its capacity.

# %%
import math

import torch

import labs
import labs.memory_math as lab

labs.warm_up()
PRESET = lab.preset()  # sizes of what is measured; add layers=4, or another size, to change it
MODELS = lab.model_sizes()
lab.show_models()

# %% [markdown]
# ## Counting parameters
#
# The memory of the model states is a multiple of Ψ, the number of parameters. If you count
# Llama-3-8B's head twice, Ψ is off by half a billion: 8.4 GB at 16 bytes each.
#
# A decoder has an embedding, `m.layers` equal blocks, a final norm and a head. Llama-3 uses
# **grouped-query attention**: its 32 query heads share 8 key and value heads, each `m.head_dim`
# wide. Its feed-forward part, SwiGLU, has three matrices. Each RMSNorm has one vector.

# %%
lab.show_block("Llama-3-8B")

# %% [markdown]
# GPT-2 is older. It has as many key heads as query heads, all in one matrix, `c_attn`. Its
# feed-forward part has two matrices. All its matrices have biases. Each LayerNorm has two vectors, a
# weight and a bias. Qwen2 is a Llama with biases for queries, keys and values.

# %%
lab.show_block("GPT-2")

# %% [markdown]
# The biases of the ten models differ. So the next cell counts them for you: a flag such as
# `m.qkv_bias` is True or False, and counts as 1 or 0 in a product.

# %%
MODELS["Llama-3-8B"].kv_heads, MODELS["GPT-2"].qkv_bias

# %% [markdown]
# ### Exercise 1.1 · The parameters of one block
#
# *Difficulty 2 of 5 · 10 minutes · target: the exact number, for ten models*
#
# Add the attention matrices, the feed-forward matrices, the norms and `biases`. `m.hidden` is the
# width of the model, and `m.ffn` that of its feed-forward part. `m.family` is `"gpt2"`, `"llama"` or
# `"qwen2"`.

# %%
# Exercise 1.1: the parameters of one block
def block_parameters(m):
    """Elements of all matrices, biases and norms of one block of sizes m."""
    h, f = m.hidden, m.ffn
    q, k = m.heads * m.head_dim, m.kv_heads * m.head_dim  # width of all queries; of all keys
    ups = 1 if m.family == "gpt2" else 2  # feed-forward matrices from h to f inputs
    biases = m.qkv_bias * (q + 2 * k) + m.out_bias * h + m.mlp_bias * (ups * f + h)
    ### BEGIN SOLUTION
    attention = h * q + 2 * h * k + q * h
    feed_forward = (ups + 1) * h * f
    norms = 2 * h * (2 if m.family == "gpt2" else 1)
    return attention + feed_forward + norms + biases
    ### END SOLUTION

# %% [markdown]
# ### Exercise 1.1, second half · The parameters of the complete model
#
# *Difficulty 2 of 5 · 5 minutes · target: the exact number, for ten models*
#
# The embedding has a row of width `m.hidden` for each of `m.vocabulary` tokens. GPT-2 also learns
# such a row for each of `m.positions`, which is 0 in the other families. A **tied** head shares the
# embedding's matrix. So a model with `m.tied` has that matrix once.
#
# First guess: what percentage of Llama-3-8B's parameters is outside its blocks?

# %%
# A guess, for exercise 1.1
### BEGIN SOLUTION
my_guess = 5
### END SOLUTION
labs.guess("1.1", "% of Llama-3-8B outside its blocks", my_guess)

# %%
# Exercise 1.1, second half: the complete model
def model_parameters(m):
    """Embedding, positions, blocks, final norm, and a head that is not tied."""
    ### BEGIN SOLUTION
    norm = m.hidden * (2 if m.family == "gpt2" else 1)
    matrices = 1 if m.tied else 2
    words = (matrices * m.vocabulary + m.positions) * m.hidden
    return words + m.layers * block_parameters(m) + norm
    ### END SOLUTION


# %%
lab.check_parameters(block_parameters, model_parameters)

# %% [markdown]
# <details><summary>Hint</summary>
#
# A matrix from a inputs to b outputs has a·b parameters. Go through the two tables line by line. For
# each matrix, which sizes of `m` are its two widths?
#
# Outline of the block: (1) attention: the matrices of queries, keys, values and output, where keys
# and values are only `k` wide; (2) feed-forward: `ups` matrices from `h` to `f`, and one back;
# (3) two norms, of one vector each, or of two in GPT-2; (4) the biases.
#
# Outline of the model: the embedding, a second such matrix if the head is not tied, the positions,
# all blocks, one norm.
#
# </details>

# %% [markdown]
# The check builds each model on PyTorch's **meta** device, where tensors have shapes and no memory,
# and compares exactly. Llama-3-70B has 70,553,706,496 parameters. Three of the ten models are small
# and have random sizes.

# %%
lab.show_outside_blocks(block_parameters, model_parameters)

# %% [markdown]
# **Notice:** a large vocabulary matters most in a small model. Compare Llama-3-8B with Llama-3-70B,
# which has the same vocabulary, and with Llama-2-7B, whose vocabulary has 32,000 tokens.

# %% [markdown]
# ## Model states: bytes per parameter
#
# In fp32 the weights of a 7B model take 28 GB, and training it takes 112 GB. For each parameter,
# training keeps weight, gradient and optimizer state: Adam's two **moments**.
#
# In 16 bits, small updates are lost to rounding. So many recipes keep an fp32 **master copy** of the
# weights. The optimizer updates it, so it counts as optimizer state. A recipe is a choice of dtypes.
# `dtype.itemsize` is the bytes of one element.

# %%
FP32 = torch.float32
BF16 = torch.bfloat16
RECIPES = {  # dtypes of weights, gradients and moments; is there a master copy?
    "fp32": (FP32, FP32, FP32, False),
    "bf16": (BF16, BF16, BF16, False),
    "bf16, fp32 moments": (BF16, BF16, FP32, False),
    "bf16, fp32 master": (BF16, BF16, FP32, True),
    "megatron": (BF16, FP32, FP32, True),
}
weight = torch.ones((), dtype=BF16)
print(f"one weight: {BF16.itemsize} bytes; 1 + 0.001 in bf16: {(weight + 0.001).item()}")

# %% [markdown]
# ### Exercise 1.2 · Bytes per parameter
#
# *Difficulty 1 of 5 · 5 minutes · target: the bytes of real tensors, for any dtypes*
#
# First guess: how many bytes per parameter does the recipe "bf16, fp32 master" need?

# %%
# A guess, for exercise 1.2
### BEGIN SOLUTION
my_guess = 12
### END SOLUTION
labs.guess("1.2", "bytes per parameter, bf16 with fp32 master", my_guess)

# %%
# Exercise 1.2: bytes per parameter
def bytes_per_parameter(weights, gradients, moments, master):
    """Bytes for one parameter: (of its weight, of its gradient, of its optimizer state)."""
    ### BEGIN SOLUTION
    state = 2 * moments.itemsize + (4 if master else 0)
    return weights.itemsize, gradients.itemsize, state
    ### END SOLUTION

# %% [markdown]
# ### Exercise 1.2, second half · Which recipes does a figure assume?
#
# *Difficulty 2 of 5 · 5 minutes · target: all recipes of seven figures, and no other*
#
# A blog says that training 7B needs 84 GB, another says 112 GB. Which recipes do they assume? Return
# the names of all recipes whose model states, rounded to whole GB, equal the figure. There may be
# one, several, or none. `recipes` is a dictionary like `RECIPES`.

# %%
# Exercise 1.2, second half: the recipes behind a figure
def recipes_behind(gigabytes, billions, recipes):
    """A list of the names of recipes with which `billions` of parameters take `gigabytes`."""
    ### BEGIN SOLUTION
    names = []
    for name, types in recipes.items():
        size = billions * sum(bytes_per_parameter(*types))
        if round(size) == gigabytes:
            names.append(name)
    return names
    ### END SOLUTION


# %%
lab.check_bytes_per_parameter(bytes_per_parameter, recipes_behind)

# %%
lab.show_recipes(bytes_per_parameter, RECIPES)

# %% [markdown]
# **Notice:** "fp32" and "bf16, fp32 master" need equally many bytes. The master copy costs what the
# 16-bit weights and gradients save.
#
# Solid bars are real tensors after a step of `torch.optim.AdamW`. The second bar is
# `model.bfloat16()`. It keeps the moments in 16 bits too, because AdamW allocates them in the
# weights' dtype.

# %%
lab.show_quoted_figures(bytes_per_parameter, RECIPES)

# %% [markdown]
# **Notice:** a figure without its recipe says little. Two recipes give 112 GB for 7B.
#
# Some texts add "28 GB for the optimizer" to the other states of a recipe with 12 bytes. This mixes
# two recipes. Find 28 in the last column.

# %% [markdown]
# ## Mixed precision and memory
#
# Does mixed precision halve memory? The model states do not shrink, as you have just seen. But
# activations are in 16 bits too. The next cell trains the preset's GPT-2 twice, with the recipes
# "fp32" and "bf16, fp32 master", and records every allocation. Both have fp32 moments.

# %%
lab.show_mixed_precision(PRESET)

# %% [markdown]
# **Notice:** the model states together take as much memory as in fp32. Activations take half. (They
# take slightly more than half, because the loss is computed in fp32.)
#
# So mixed precision halves the memory of a job that is mostly activations. For the model states it
# makes training faster, not smaller.

# %% [markdown]
# ## Optional: temporary memory in the optimizer step
#
# A step of AdamW may allocate temporaries. How many depends on its implementation. **foreach**, the
# default on a GPU, treats all parameters in one call. A **fused optimizer** computes everything in
# one kernel. An **8-bit optimizer** keeps each moment in one byte, with an fp32 scale for every 256
# of them.

# %%
lab.show_optimizers()

# %% [markdown]
# For 7B in fp32, the foreach step allocates 28 GB of temporaries. `AdamW(parameters, fused=True)`
# allocates none. An 8-bit optimizer saves 6 of the 8 bytes of moments. If the recipe has a master
# copy, that stays.

# %% [markdown]
# ## Sharding the model states: ZeRO-1, -2 and -3
#
# 70B with 12 bytes per parameter is 840 GB. Eight A100-80 have 681 GB together, and plain data
# parallelism replicates all 840 GB on each of them. **ZeRO** shards the states among N ranks. Stage 1
# shards the optimizer state, stage 2 also the gradients, and stage 3 also the parameters. Stage 0 is
# plain data parallelism.

# %% [markdown]
# ### Exercise 1.3 · Bytes per rank
#
# *Difficulty 1 of 5 · 5 minutes · target: three numbers for each of the stages 0 to 3*
#
# First guess: how many GB of this 70B model does each of 8 ranks hold under ZeRO-2?

# %%
# A guess, for exercise 1.3
### BEGIN SOLUTION
my_guess = 210
### END SOLUTION
labs.guess("1.3", "GB per rank, 70B on 8 ranks, ZeRO-2", my_guess)

# %%
# Exercise 1.3: bytes per rank
def per_rank(count, recipe, stage, ranks):
    """Bytes on one rank: (parameters, gradients, optimizer state). recipe: bytes per parameter of
    each, as bytes_per_parameter returns them."""
    ### BEGIN SOLUTION
    parameters, gradients, state = (count * size for size in recipe)
    if stage >= 1:
        state /= ranks
    if stage >= 2:
        gradients /= ranks
    if stage == 3:
        parameters /= ranks
    return parameters, gradients, state
    ### END SOLUTION


# %%
lab.check_per_rank(per_rank)

# %%
lab.show_figure_1(per_rank)

# %% [markdown]
# Compare with figure 1 of the *[ZeRO paper](https://arxiv.org/abs/1910.02054)*, which prints 120,
# 31.4, 16.6 and 1.9 GB.
#
# **Notice:** what a stage does not shard soon dominates. Under ZeRO-1 nearly all that remains is
# weights and gradients.

# %%
lab.show_70b(per_rank)

# %% [markdown]
# **Notice:** 840/4 = 210 GB is too low for ZeRO-2. Your bar is longer, because each rank still owns
# its shard of the gradients: 2 bytes × 70B / 8. Even ZeRO-3 needs more than an A100 has.

# %%
lab.show_savings(per_rank)

# %% [markdown]
# ZeRO-1 is said to save 4 times and ZeRO-2 8 times. These are limits for infinitely many ranks. Look
# at the line for 8 ranks. Only ZeRO-3 saves N times on N ranks. So it is said to allow models of a
# trillion parameters: on 1,024 ranks, 16 · 10¹² bytes are 15.6 GB each, without activations.

# %% [markdown]
# What does sharding cost? Instead of an all-reduce of gradients, ranks all-gather what they do not
# own. The table lists what a step communicates, by phase.

# %%
lab.show_traffic()

# %% [markdown]
# ZeRO-1 and -2 send the two halves of DDP's all-reduce. The second half comes after the step, when
# the parameters are updated. ZeRO-3 gathers every parameter twice. Add up each line: how many Ψ does
# a stage send in a step? Notebook 03 measures it.

# %% [markdown]
# ## Second sitting · 65 minutes
#
# | In short | This sitting |
# |:--|:--|
# | **Core** | 1.4, 1.6, 1.7 |
# | **Optional** | 1.5, 1.8, 1.10 |
# | **In a new kernel** | run the cells of the imports and of `RECIPES`, and those of 1.1, 1.2 and 1.3 |
#
# You will be able to:
#
# - estimate activations with and without checkpointing;
# - decide whether a job fits on a GPU, and name what your estimate leaves out.

# %% [markdown]
# ## Activation memory
#
# Backward needs what forward computed. For one sequence of 4096 tokens, Llama-2-7B saves 25 GB,
# while its weights take only 13 GB. No ZeRO stage shards activations.
#
# First guess: a GPT-2 block works on s·b·h numbers, where s is the sequence length, b the batch size
# and h the hidden size. How many bytes does it save for each of them, with 1024 tokens, h = 768,
# a = 12 heads and attention that is not fused?

# %%
# A guess, for exercise 1.4
### BEGIN SOLUTION
my_guess = 60
### END SOLUTION
labs.guess("1.4", "activations of a GPT-2 layer, in s·b·h", my_guess)

# %% [markdown]
# The table lists every tensor that one real GPT-2 block saves, each as a multiple of s·b·h. Two
# tensors and a mask grow with s² instead: the **scores**, one number for each of a heads and each
# pair of tokens, so a·b·s² numbers in all. **Fused** attention (FlashAttention) computes the scores
# in pieces and never writes them to memory. In fp32, no GPU kernel does this for grouped-query
# attention, as in Llama 3: an H200 kept all scores.

# %%
lab.show_saved_tensors()

# %% [markdown]
# ### Exercise 1.4 · What one layer saves
#
# *Difficulty 3 of 5 · 10 minutes · target: a real block's bytes, without the norms' statistics*
#
# Your formula has two terms. First sum the coefficients of the s·b·h rows. The attention scores grow
# with s², so they get a term of their own: a multiple of a·b·s² bytes. Leave out the norms'
# statistics.

# %%
# Exercise 1.4: what one layer saves
def layer_activations(batch, sequence, hidden, heads, fused):
    """Bytes that a GPT layer in 16 bits, with dropout, saves for backward."""
    ### BEGIN SOLUTION
    scores = 0 if fused else 5 * heads * batch * sequence**2
    return 34 * sequence * batch * hidden + scores
    ### END SOLUTION

# %% [markdown]
# ## Logits and the loss
#
# The head computes the **logits**, one number for each token and each entry of the vocabulary. For
# 8192 tokens of Llama-3-8B these are a billion numbers. Cross-entropy turns them into
# log-probabilities, in fp32 even if the model is in bf16. The memory meter measured how many bytes a
# step of a small Llama holds for each logit.

# %%
lab.show_logits()

# %% [markdown]
# After forward, the log-softmax output (4 bytes) stays. Backward adds two gradients of the same
# size, of the log-softmax and of the logits. All three are in fp32: 12 bytes at the peak.

# %% [markdown]
# ### Exercise 1.4, second half · The activations of a model
#
# *Difficulty 3 of 5 · 10 minutes · target: bytes at the peak, for four models*
#
# Attention is fused. Without checkpointing all layers keep their activations, and the loss adds 12
# bytes for each of batch × sequence × vocabulary logits.
#
# With **checkpointing** a layer keeps only its input, in 16 bits. Add to these inputs the larger of
# two: the loss, or one layer that backward recomputes. They are never in memory together.

# %%
# Exercise 1.4, second half: the activations of a model at its peak
def activations(m, batch, sequence, checkpointing):
    """Bytes of m.layers layers in 16 bits with fused attention, and of the loss, at the peak."""
    ### BEGIN SOLUTION
    layer = layer_activations(batch, sequence, m.hidden, m.heads, fused=True)
    loss = 12 * batch * sequence * m.vocabulary
    if not checkpointing:
        return m.layers * layer + loss
    kept = 2 * batch * sequence * m.hidden
    return m.layers * kept + max(layer, loss)
    ### END SOLUTION


# %%
lab.check_activations(layer_activations, activations)

# %% [markdown]
# <details><summary>Hint for one layer</summary>
#
# In which rows does the shape contain s twice? Those three are the scores. All other rows, except
# the four of means and deviations, are multiples of s·b·h.
#
# Outline: (1) add up the last column over the s·b·h rows; (2) for each of a·b·s² scores, count the
# bytes: two tensors of 16-bit numbers, and a mask of one byte; (3) with fused attention the second
# term is 0.
#
# </details>

# %% [markdown]
# <details><summary>Hint for the model</summary>
#
# At the peak, which layers have all their activations, and which have only their input? A layer's
# input has s·b·h numbers of 16 bits.
#
# Outline: (1) the bytes of one layer, from your first function, and those of the loss; (2) without
# checkpointing: all layers and the loss; (3) with checkpointing: all inputs, and `max` of a layer
# and the loss.
#
# </details>

# %%
lab.show_layer_activations(layer_activations)

# %% [markdown]
# **Notice:** your formula is sbh(34 + 5as/h), that of
# *[Korthikanti et al.](https://arxiv.org/abs/2205.05198)*. It counts bytes, and is often doubled by
# mistake.
#
# Llama's layer differs: it has no dropout, its RMSNorm computes in fp32, and its feed-forward part is
# wider.

# %%
lab.show_activations(activations)

# %% [markdown]
# **Notice:** with a vocabulary of 128,256 the loss takes almost six times as many bytes as all 32
# checkpoints. So with checkpointing the peak is at the loss.
#
# The last line is predicted from every tensor that PyTorch allocates, final norm included. Your
# formula is less than 2 % below it.

# %% [markdown]
# ## Optional: long context
#
# Models are trained on ever longer sequences: 4k tokens for Llama 2, 128k for Llama 3.1. Which parts
# of your formula grow with s, and which with s²? The table calls your functions.

# %%
lab.show_sequence_lengths(layer_activations, activations)

# %% [markdown]
# **Notice:** eager attention grows with s². At 8k tokens it takes more memory than any GPU has. With
# fused attention, memory grows linearly with s.
#
# But 16k tokens nearly fill an A100, even without model states. Longer sequences need checkpointing.
# Even with checkpointing, 128k tokens take 84.7 GB. Of these, 50.3 GB are not the layers': they are 12 bytes
# for each logit.

# %% [markdown]
# **Chunked cross-entropy** computes head, loss and their gradients for a few thousand tokens at a
# time. So the logits of all tokens are never in memory together. In the last column the peak moves to
# a layer: 52.6 GB. One library with it is *[Liger Kernel](https://github.com/linkedin/Liger-Kernel)*.
#
# The remaining memory grows with s too. So for longer sequences or larger models, the sequence itself
# is sharded among ranks (notebook 07a).

# %% [markdown]
# ## Optional: the cost of activation checkpointing
#
# Checkpointing keeps only a block's input. So backward must recompute the block before it can
# compute gradients.
#
# First guess: how many times the operations of a step without checkpointing does a step with
# checkpointing need?

# %%
# A guess, for exercise 1.5
### BEGIN SOLUTION
my_guess = 1.5
### END SOLUTION
labs.guess("1.5", "a step with checkpointing, as a multiple of one without", my_guess)

# %% [markdown]
# ### Exercise 1.5 · The FLOPs of a step
#
# *Difficulty 2 of 5 · 10 minutes · target: the FLOPs that PyTorch counts*
#
# In forward, each parameter of a matrix is multiplied and added once per token: 2 operations
# (FLOPs). Backward does this twice, for the gradients of input and weight.
#
# What is recomputed? Only the blocks are checkpointed, not the head. PyTorch stops recomputing a
# block when it has what backward needs: the *input* of the block's last matrix, not its output.

# %%
# Exercise 1.5: the FLOPs of a step
def step_flops(blocks, last, head, tokens, checkpointing):
    """FLOPs of forward and backward. blocks: parameters in the matrices of all blocks; last: those
    of them that are in a block's last matrix; head: parameters in the head."""
    ### BEGIN SOLUTION
    again = blocks - last if checkpointing else 0
    return 6 * (blocks + head) * tokens + 2 * again * tokens
    ### END SOLUTION


# %%
lab.check_step_flops(step_flops)

# %%
cost = lab.measure_checkpointing(PRESET)
lab.show_checkpointing_cost(cost, step_flops)

# %% [markdown]
# The quoted "33 % more" is 8/6. It holds for a model without a head, if each block is recomputed in
# full. PyTorch recomputes less: compare the first two bars. The grey bar is the time on this
# machine, which differs from run to run. Recomputing also moves memory.

# %%
lab.show_checkpointing_memory(cost)

# %% [markdown]
# This is the memory that checkpointing saves in return. The ticks are predicted from the model's
# configuration alone.

# %% [markdown]
# ## Does a job fit? Peak memory per rank
#
# If a job on a rented node runs out of memory in its first step, you pay for nothing. Your functions
# compute model states and activations. You need two more numbers:
#
# | call | returns |
# |:--|:--|
# | `gpu.usable` | the memory that CUDA reports, in bytes |
# | `lab.overhead(ranks)` | the bytes that CUDA and NCCL take before the first tensor |

# %%
a100 = lab.gpu("A100-80")
print(f"{a100.usable / 1e9:.1f} GB, of which CUDA and NCCL take {lab.overhead(4) / 1e9:.2f}")

# %% [markdown]
# ### Exercise 1.6 · The bytes that are left
#
# *Difficulty 2 of 5 · 10 minutes · target: six jobs to the byte, two of them random*
#
# First guess: how many GB per rank does a 13B model need in all, with 12 bytes per parameter and
# ZeRO-3 on 4 GPUs?

# %%
# A guess, for exercise 1.6
### BEGIN SOLUTION
my_guess = 39
### END SOLUTION
labs.guess("1.6", "GB per rank, 13B with ZeRO-3 on 4 ranks", my_guess)

# %%
# Exercise 1.6: the bytes that are left
def bytes_left(m, recipe, stage, ranks, batch, sequence, checkpointing, gpu):
    """Bytes left on one GPU; less than 0 if the job does not fit. batch: sequences per rank."""
    ### BEGIN SOLUTION
    states = sum(per_rank(model_parameters(m), recipe, stage, ranks))
    kept = activations(m, batch, sequence, checkpointing)
    return gpu.usable - lab.overhead(ranks) - states - kept
    ### END SOLUTION

# %% [markdown]
# ### Exercise 1.6, second half · The largest batch
#
# *Difficulty 2 of 5 · 5 minutes · target: the largest batch of seven jobs, 0 where none fits*
#
# A larger batch keeps a GPU busier, so a job often takes the largest batch per rank that fits. A
# batch fits if it leaves 0 bytes or more.

# %%
# Exercise 1.6, second half: the largest batch
def largest_batch(m, recipe, stage, ranks, sequence, checkpointing, gpu):
    """The largest number of sequences per rank that fit on the GPU; 0 if not even one does."""
    ### BEGIN SOLUTION
    batch = 0
    while bytes_left(m, recipe, stage, ranks, batch + 1, sequence, checkpointing, gpu) >= 0:
        batch += 1
    return batch
    ### END SOLUTION


# %%
lab.check_bytes_left(bytes_left, largest_batch)

# %%
lab.show_bytes_left(bytes_left, largest_batch)

# %% [markdown]
# **Notice:** "84 GB for 7B" is less than the 85.1 GB of an A100-80, and Llama-2-7B has even fewer
# than 7 billion parameters. Does your function say that 7B fits under DDP? If not, what takes the
# rest? And how far is 13B with ZeRO-3 from the limit?

# %%
lab.show_self_check(bytes_left, per_rank, activations)

# %% [markdown]
# **Notice:** below each of your estimates is a prediction that counts every buffer. DDP copies all
# gradients into its **buckets**. ZeRO-3 gathers a block's parameters before it uses them. AdamW's
# foreach step allocates a temporary as large as one moment (grey).
#
# So 7B under DDP needs much more than you estimated. 13B with ZeRO-3 takes 55 of 85 GB.

# %% [markdown]
# ## Predicted and measured memory
#
# An estimate that nobody has measured is a guess. Now real ranks train a small GPT-2 in fp32 with
# AdamW: on one rank alone, then under DDP and under FSDP2 (ZeRO-3 in PyTorch) on several ranks.
# Every allocation is recorded, on GPUs if the machine has any. With a single GPU, 2 ranks share it.

# %% [markdown]
# ### Exercise 1.7 · What a rank holds after backward
#
# *Difficulty 2 of 5 · 10 minutes · target: to the byte what ranks hold, on 1, 2 and 4 ranks*
#
# After backward all model states are in memory. **Buffers** are memory that communication keeps.
# Under DDP they are a copy of the gradients. FSDP2 keeps no buffers after backward. Leave out
# AdamW's step counters, one number for each tensor.

# %%
# Exercise 1.7: what a rank holds after backward
def rank_states(count, strategy, ranks):
    """Bytes: (parameters, gradients, optimizer state, buffers) of one rank in fp32 with AdamW.
    strategy: "plain", "DDP" or "FSDP2"."""
    ### BEGIN SOLUTION
    stage = 3 if strategy == "FSDP2" else 0
    parameters, gradients, state = per_rank(count, (4, 4, 8), stage, ranks)
    buckets = 0
    if strategy == "DDP":
        buckets = gradients
    return parameters, gradients, state, buckets
    ### END SOLUTION


# %%
lab.check_rank_states(rank_states)

# %% [markdown]
# The preset's model has 1.2 million parameters on a laptop, 59 million on one GPU and 202 million on
# a node. How many MB will a rank hold at its peak under DDP? Include the activations of one sequence
# of 16 tokens.

# %%
# A guess, for exercise 1.7
### BEGIN SOLUTION
my_guess = 25
### END SOLUTION
labs.guess("1.7", "MB per rank at the peak, DDP", my_guess)

# %%
measured = lab.measure_ranks(PRESET)
measured

# %%
lab.show_rank_states(measured, rank_states)

# %%
lab.show_unexplained_bytes(measured, rank_states)

# %% [markdown]
# Your formula is right to the byte, except for AdamW's step counters. If a few bytes are not
# explained, DDP or FSDP2 keeps them. A GPU's allocator rounds the size of each tensor up.

# %%
lab.show_peak(measured)

# %% [markdown]
# **Notice:** on a CPU the prediction equals the measured peak.
#
# Each rank trained one sequence of 16 tokens, so nearly all of its memory is model states. DDP needs
# more than one rank alone, because of its buckets. FSDP2 shards parameters, gradients and moments
# among its ranks. In exchange, its buffers hold the gathered block.

# %% [markdown]
# ## Memory explorer
#
# `labs.plan` also counts buckets, gathered parameters and the temporaries of AdamW's foreach step.
# Find the largest model that 8 A100-80 train under ZeRO-3 with checkpointing. Then turn checkpointing
# off.

# %%
labs.plan(only="memory")

# %% [markdown]
# ## Optional: allocated, reserved and `nvidia-smi`
#
# A GPU has three memory numbers. **Allocated** is the memory of live tensors. **Reserved** is the
# memory that PyTorch's allocator holds from CUDA. `nvidia-smi` shows all memory of the process. An
# allocation fails with "out of memory" when the last number reaches the GPU's capacity. A CPU has
# none of the three, so on a laptop the table is computed.

# %%
lab.show_gpu_memory(PRESET)

# %% [markdown]
# The next table names what makes them differ. On an H200, nine runs of one rank with 1B to 8B
# parameters reserved 8 to 40 % more than their tensors took at the peak. Plan for this.

# %%
lab.show_other_memory()

# %% [markdown]
# ## Optional: a dry run of Llama-3-70B
#
# How accurate is a prediction for a job that you cannot run? A **dry run** checks it. It builds the
# real modules with fake tensors, which have shapes but no data, on simulated ranks, and records the
# allocations of one step. The next cell predicts Llama-3-70B under FSDP2 on 8 to 1024 ranks, and dry
# runs the step on 1024. It takes about ten seconds.

# %%
lab.show_scaling(traced=(1024,))

# %% [markdown]
# The model states shrink as ranks are added. Activations and gathered parameters do not. So beyond
# some number of ranks, more ranks save almost no memory.

# %% [markdown]
# ## Optional: saved tensor hooks
#
# Your formula says 34sbh for a GPT-2 block. A block with Llama-3's proportions saved 49sbh. Which
# part makes the difference? You can measure it. torch calls two functions of yours, the **saved
# tensor hooks**, for every tensor that autograd saves. `pack` gets the tensor, and autograd saves what
# `pack` returns. Backward passes that to `unpack`, and uses what `unpack` returns.

# %% [markdown]
# | call | returns |
# |:--|:--|
# | `torch.autograd.graph.saved_tensors_hooks(pack, unpack)` | a context: the hooks are called for what is saved inside it |
# | `tensor.untyped_storage()` | the memory of a tensor; its views share it |
# | `storage.data_ptr()`, `storage.nbytes()` | its address, and its size in bytes |
#
# `pack` must not return the tensor itself: the tensor may keep the graph that keeps the tensor, and
# then neither is ever freed. `tensor.detach()` shares the memory without the graph.

# %%
def look(saved):
    print(f"saved: {saved.nbytes} bytes, in a storage of {saved.untyped_storage().nbytes()}")
    return saved.detach()


x = torch.ones(1000, requires_grad=True)
with torch.autograd.graph.saved_tensors_hooks(look, lambda kept: kept):
    y = torch.nn.functional.silu(x[:10])

# %% [markdown]
# ### Exercise 1.8 · Bytes saved for backward
#
# *Difficulty 4 of 5 · 30 minutes · target: to the byte what twelve forwards save; nothing of it stays
# afterwards*
#
# `forward()` returns a tensor. `held` lists tensors that are in memory anyway: parameters and inputs.
# Count each storage once and in full, even if only a view is saved. A checkpointed block saves only
# its input.
#
# First guess: GPT-2's two norms save 4sbh. How many s·b·h do Llama's two norms save?

# %%
# A guess, for exercise 1.8
### BEGIN SOLUTION
my_guess = 4
### END SOLUTION
labs.guess("1.8", "s·b·h that the two norms of Llama save", my_guess)

# %%
# Exercise 1.8: bytes saved for backward
def bytes_for_backward(forward, held):
    """Bytes that forward() leaves in memory for its backward, without the storages of `held`."""
    ### BEGIN SOLUTION
    sizes = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
        forward()
    known = {tensor.untyped_storage().data_ptr() for tensor in held}
    return sum(nbytes for address, nbytes in sizes.items() if address not in known)
    ### END SOLUTION

# %%
lab.check_bytes_for_backward(bytes_for_backward)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Two storages have different addresses. Which addresses must not count?
#
# Outline: (1) `pack` stores the address and the size of its tensor's storage; (2) call `forward`
# inside the context; (3) add up the sizes of all addresses that no tensor of `held` has. Store
# numbers only. A list of tensors that `pack` fills keeps the graph alive, the graph keeps `pack`, and
# `pack` keeps the list.
#
# </details>

# %%
lab.show_saved_parts(bytes_for_backward, layer_activations)

# %% [markdown]
# Your 34 is 4 + 11 + 19. Llama's attention saves less than GPT-2's: its keys and values are a quarter
# as wide, and it has no dropout. But RMSNorm computes in fp32, so each norm saves an fp32 copy of its
# input (4sbh) and its result (2sbh). SwiGLU saves its input and four tensors of 3.5 times the model's
# width (4 · 7sbh). With checkpointing, either block saves only its input.

# %% [markdown]
# ## Optional: the minimum number of ranks
#
# More ranks do not always help: what a stage does not shard, every rank holds in full.

# %% [markdown]
# ### Exercise 1.10 · On how many ranks does a model fit?
#
# *Difficulty 3 of 5 · 10 minutes · target: the minimum number of ranks, or None*
#
# A rank has `room` bytes for its model states. What is the minimum number of ranks on which the
# states of one rank take at most `room` bytes? Return None if no number is enough.

# %%
# Exercise 1.10: the fewest ranks
def fewest_ranks(count, recipe, stage, room):
    """The smallest number of ranks on which one rank's states fit in `room` bytes, or None."""
    ### BEGIN SOLUTION
    sharded = sum(count * size for size, first in zip(recipe, (3, 2, 1)) if stage >= first)
    left = room - (count * sum(recipe) - sharded)
    if left < 0 or (left == 0 and sharded):
        return None
    return math.ceil(sharded / left) if sharded else 1
    ### END SOLUTION


# %%
lab.check_fewest_ranks(fewest_ranks)

# %% [markdown]
# <details><summary>Hint</summary>
#
# On very many ranks the shards become arbitrarily small. What remains on each rank, and does that
# fit?
#
# Outline: (1) the bytes that the stage shards, and those that it replicates; (2) the room that is left
# beside the replicated bytes: if it is negative, no number of ranks helps; (3) each rank's shard must
# fit into that room, so divide the sharded bytes by it and round up; (4) what if the room left is
# 0, or if nothing is sharded?
#
# </details>

# %% [markdown]
# ## I can …
#
# - count a Llama's parameters from its configuration
# - say which recipe a figure like "84 GB" assumes
# - write down how many bytes a rank holds under each ZeRO stage
# - say which memory mixed precision halves, and which it does not
# - say why the loss matters once checkpointing is enabled
# - name three things that take GPU memory and are not in my formula

# %% [markdown]
# ## How it usually goes wrong
#
# - **A figure without its recipe**: 84 and 112 GB are the same model.
# - **GB confused with GiB**: the 7 % decide whether the largest job fits.
# - **The head forgotten, or counted twice** when it is tied.
# - **Elements and bytes confused**: 34sbh is in bytes already.
# - **DDP's buckets, the 12 bytes per logit and the optimizer's temporaries forgotten**: by the
#   estimate the job fits, and it runs out of memory in the first step.

# %% [markdown]
# ## What to read
#
# | read | by | a question |
# |:--|:--|:--|
# | [ZeRO](https://arxiv.org/abs/1910.02054) | S. Rajbhandari et al., SC 2020, sections 3 and 5 | Which row of table 1 would your cluster be? |
# | [Transformer Math 101](https://blog.eleuther.ai/transformer-math/) | EleutherAI, 2023 | It counts 12 bytes of optimizer state, your recipe "fp32" has 8. Which bar of your chart shows the other 4? |
# | [Reducing Activation Recomputation](https://arxiv.org/abs/2205.05198) | V. Korthikanti et al., 2022, section 4 | What does only sequence parallelism shard? |
# | [torch.utils.checkpoint](https://docs.pytorch.org/docs/stable/checkpoint.html) | PyTorch | What does `early_stop` leave out? |

# %% [markdown]
# ## What comes next
#
# Notebook 02, Manual DDP: how N copies of a model train as one.
