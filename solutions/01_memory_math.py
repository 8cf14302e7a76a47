# %% [markdown]
# # 01 · Memory math
#
# | | |
# |:--|:--|
# | **Time** | 120 minutes, and 30 for the optional exercise |
# | **Needs** | any machine with 2 cores; no GPU |
#
# The weights of Llama-2-7B take 13 GB in 16 bits, and an A100 has 85. Training it there runs out of
# memory all the same: where do the other bytes go? You write a formula for each kind of byte and
# compare it with real models and ranks.

# %% [markdown]
# *On one GPU* two ranks share it, with gloo: what each holds is a node's. NCCL's memory is then
# that of a single rank.

# %% [markdown]
# ## You will be able to
#
# - count a model's parameters from its configuration, exactly;
# - say how many bytes a recipe needs for each, and each rank under ZeRO-1, -2 and -3;
# - say what mixed precision halves, and what an optimizer's step needs for a moment;
# - estimate activations, and say what checkpointing costs and saves;
# - decide whether a job fits on a GPU, and name what your estimate leaves out.

# %% [markdown]
# ## The models
#
# A **configuration** lists a model's sizes, and everything else follows from them. Below, `m` stands
# for one column of the table, for example `m.hidden`.
#
# Throughout, a GB is 10⁹ bytes and a GiB 2³⁰, which is 7 % more. An "80 GB" A100 really has 80 GiB.
# The driver takes some of it, and CUDA reports 79.25 GiB, or 85.1 GB. This is its capacity in all
# our charts.

# %%
import math

import torch

import labs
import labs.memory_math as lab

labs.warm_up()
PRESET = lab.preset()  # for what is measured; add layers=4, or another size, to change it
MODELS = lab.model_sizes()
lab.show_models()

# %% [markdown]
# ## Parameters
#
# What training keeps for a model is a multiple of Ψ, its number of parameters. If you count the head
# of Llama-3-8B twice, you are off by half a billion: 8.4 GB at 16 bytes each.
#
# A decoder is an embedding, `m.layers` equal blocks, a final norm and a head. Llama-3 uses
# **grouped-query attention**: its 32 query heads share 8 key and value heads, each `m.head_dim`
# wide. Its feed-forward part, SwiGLU, has three matrices; each RMSNorm has one vector.

# %%
lab.show_block("Llama-3-8B")

# %% [markdown]
# GPT-2 is older. It has as many key heads as query heads (all in one matrix, `c_attn`), two
# feed-forward matrices, biases, and LayerNorms, whose two vectors are a weight and a bias. Qwen2 is
# a Llama with biases for queries, keys and values.

# %%
lab.show_block("GPT-2")

# %% [markdown]
# ### Exercise 1.1 · The parameters of one block
#
# *Difficulty 3 of 5 · 10 minutes · target: the exact number, for ten models*
#
# | size of a model | is |
# |:--|:--|
# | `m.family` | `"gpt2"`, `"llama"` or `"qwen2"` |
# | `m.hidden`, `m.ffn` | the width of the model, and of its feed-forward part |
# | `m.qkv_bias`, `m.out_bias`, `m.mlp_bias` | True where queries, keys and values, attention's output, or the feed-forward matrices have biases |

# %%
MODELS["Llama-3-8B"].kv_heads, MODELS["GPT-2"].mlp_bias

# %%
# Exercise 1.1: the parameters of one block
def block_parameters(m):
    """Elements of all matrices, biases and norms of one block of sizes m."""
    h, f = m.hidden, m.ffn
    q, k = m.heads * m.head_dim, m.kv_heads * m.head_dim  # all queries; all keys, or values
    ### BEGIN SOLUTION
    gpt2 = m.family == "gpt2"
    attention = h * q + 2 * h * k + q * h + m.qkv_bias * (q + 2 * k) + m.out_bias * h
    ups = 1 if gpt2 else 2
    feed_forward = (ups + 1) * h * f + m.mlp_bias * (ups * f + h)
    norms = 2 * h * (2 if gpt2 else 1)
    return attention + feed_forward + norms
    ### END SOLUTION

# %% [markdown]
# <details><summary>Hint</summary>
#
# A matrix from a inputs to b outputs has a·b parameters, and its bias b. So go through the two
# tables above line by line: for each matrix, which sizes of `m` are its two widths?
#
# Outline: (1) attention: queries, keys, values and the output matrix, where keys and values are
# only `k` wide; (2) the feed-forward part: two matrices in GPT-2, three otherwise; (3) two norms,
# of one vector each, or of two in GPT-2; (4) a bias for each matrix whose flag is True. True counts
# as 1 in a product.
#
# </details>

# %% [markdown]
# ### Exercise 1.1, second half · The parameters of the whole model
#
# *Difficulty 2 of 5 · 5 minutes · target: the exact number, for ten models*
#
# The embedding has a row of width `m.hidden` for each of `m.vocabulary` tokens; GPT-2 also learns
# such a row for each of `m.positions` (0 in the other families). A **tied** head is the embedding
# itself, so a model with `m.tied` holds that matrix once.
#
# Guess first: what percentage of Llama-3-8B's parameters is in no block?

# %%
# A guess, for exercise 1.1
### BEGIN SOLUTION
my_guess = 5
### END SOLUTION
labs.guess("1.1", "% of Llama-3-8B outside its blocks", my_guess)

# %%
# Exercise 1.1, second half: the whole model
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
# The check builds each model on PyTorch's **meta** device, where tensors have shapes and no memory,
# and compares exactly, for Llama-3-70B's 70,553,706,496 parameters as for three small models whose
# sizes it draws at random each time.

# %%
lab.show_outside_blocks(block_parameters, model_parameters)

# %% [markdown]
# **Notice:** a large vocabulary matters most in a small model. Compare Llama-3-8B with Llama-3-70B,
# which has the same vocabulary, and with Llama-2-7B, whose vocabulary has 32,000 tokens.

# %% [markdown]
# ## Bytes per parameter
#
# In fp32 the weights of a 7B model take 28 GB, and training it takes 112. For each parameter,
# training keeps the weight, its gradient, and the optimizer's state: Adam's two **moments**.
#
# In 16 bits small updates are rounded away. So many recipes keep a **master copy** of the weights
# in fp32, which the optimizer updates, and count it as optimizer state. A recipe is a choice of
# types; `dtype.itemsize` is the bytes of one element.

# %%
FP32 = torch.float32
BF16 = torch.bfloat16
RECIPES = {  # weights, gradients, moments, is there a master copy?
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
# *Difficulty 1 of 5 · 5 minutes · target: the bytes of real tensors, for any types*
#
# Guess first: how many bytes for each parameter does the recipe "bf16, fp32 master" keep?

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
# ### Exercise 1.2, second half · Which recipe does a figure assume?
#
# *Difficulty 2 of 5 · 10 minutes · target: all recipes of seven figures, and no other*
#
# A blog says "you need 84 GB to train 7B", another says 112. Which recipes did they have in mind?
# Return the names of all recipes whose model states, rounded to whole GB, are the figure. It may be
# one, several, or none. `recipes` is a dictionary like `RECIPES`.

# %%
# Exercise 1.2, second half: the recipes behind a figure
def recipes_behind(gigabytes, billions, recipes):
    """A list of the names of recipes with which `billions` of parameters take `gigabytes`."""
    ### BEGIN SOLUTION
    return [name for name, types in recipes.items()
            if round(billions * sum(bytes_per_parameter(*types))) == gigabytes]
    ### END SOLUTION


# %%
lab.check_bytes_per_parameter(bytes_per_parameter, recipes_behind)

# %%
lab.show_recipes(bytes_per_parameter, RECIPES)

# %% [markdown]
# **Notice:** full bars are real tensors after a step of `torch.optim.AdamW`. Compare the first bar
# with the one of "bf16, fp32 master": what one part saves, another takes. And `model.bfloat16()`
# alone, the second bar, keeps its moments in 16 bits too: they silently take the weights' type.

# %%
lab.show_quoted_figures(bytes_per_parameter, RECIPES)

# %% [markdown]
# **Notice:** a figure without its recipe says little. Two recipes make the same figure for 7B. And
# whoever adds "28 GB for the optimizer" to the recipe of 12 bytes mixes two: find 28 in the last column.

# %% [markdown]
# ## What mixed precision halves
#
# Does mixed precision take half the memory? You have just seen that the model states do not shrink. But activations are in 16 bits too. Here the preset's GPT-2 is trained twice,
# with the recipes "fp32" and "bf16, fp32 master", and every allocation is recorded. Both have
# fp32 moments.

# %%
lab.show_mixed_precision(PRESET)

# %% [markdown]
# **Notice:** in the line "together" nothing is saved; activations take half. (A little more than
# half, because the loss is computed in fp32.) So "half" holds for a job whose memory is mostly
# activations. For the model states mixed precision makes training faster, not smaller.

# %% [markdown]
# ## What an optimizer's step needs for a moment
#
# A step of AdamW may allocate temporaries. How many depends on how it is written. **foreach**,
# the default on a GPU, treats all parameters in one call. A **fused optimizer** computes everything
# in one kernel. An **8-bit optimizer** keeps its moments in one byte each, with an fp32 scale for
# every 256 of them.

# %%
lab.show_optimizers()

# %% [markdown]
# **Notice:** for 7B in fp32, foreach needs 28 GB for a moment, in the middle of the step.
# `AdamW(parameters, fused=True)` needs none. An 8-bit optimizer saves 6 of 8 bytes of moments; a
# master copy, where there is one, stays.

# %% [markdown]
# ## States divided among ranks
#
# 70B with 12 bytes per parameter is 840 GB. Eight A100-80 have 681 GB together, and plain data
# parallelism repeats all 840 on every one of them. **ZeRO** divides them among the N ranks instead:
# stage 1 divides the optimizer state, stage 2 the gradients too, stage 3 the parameters too.
# Stage 0 is plain data parallelism.

# %% [markdown]
# ### Exercise 1.3 · Bytes per rank
#
# *Difficulty 1 of 5 · 5 minutes · target: three numbers for each of the stages 0 to 3*
#
# Guess first: how many GB does each of 8 ranks hold of this 70B model under ZeRO-2?

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
    return (parameters / (ranks if stage >= 3 else 1),
            gradients / (ranks if stage >= 2 else 1),
            state / (ranks if stage >= 1 else 1))
    ### END SOLUTION


# %% [markdown]
# ### Exercise 1.3, second half · How many GPUs does a stage need?
#
# *Difficulty 3 of 5 · 10 minutes · target: the smallest number of ranks, or None*
#
# A rank has `room` bytes for its model states. On how many ranks, at least, do they take at most
# that? More ranks do not always help: what a stage does not divide, every rank keeps whole. Return
# None where no number of ranks is enough.

# %%
# Exercise 1.3, second half: the fewest ranks
def fewest_ranks(count, recipe, stage, room):
    """The smallest number of ranks on which one rank's states fit in `room` bytes, or None."""
    ### BEGIN SOLUTION
    divided = sum(count * size for size, first in zip(recipe, (3, 2, 1)) if stage >= first)
    left = room - (count * sum(recipe) - divided)
    if left < 0 or (left == 0 and divided):
        return None
    return math.ceil(divided / left) if divided else 1
    ### END SOLUTION


# %%
lab.check_per_rank(per_rank, fewest_ranks)

# %% [markdown]
# <details><summary>Hint</summary>
#
# On very many ranks the divided part shrinks to nothing. What is left then, and does it fit?
#
# Outline: (1) the bytes that the stage divides, and those that every rank keeps whole; (2) the room
# that is left beside the whole ones: if it is negative, no number helps; (3) each rank's share of
# the divided bytes must fit into that room, so divide one by the other and round up; (4) what if
# the room that is left is 0, or nothing is divided?
#
# </details>

# %%
lab.show_figure_1(per_rank)

# %% [markdown]
# **Notice:** compare with figure 1 of the ZeRO paper, which prints 120, 31.4, 16.6 and 1.9 GB. What
# a stage does not divide soon dominates: under ZeRO-1 nearly all that remains are the weights and
# gradients.

# %%
lab.show_70b(per_rank)

# %% [markdown]
# **Notice:** who takes 840/4 for ZeRO-2 gets 210 GB. Your bar is longer, by the gradients that each
# rank still owns: 2 bytes × 70B / 8. Even the bar of ZeRO-3 ends beyond the line of the A100.

# %%
lab.show_savings(per_rank)

# %% [markdown]
# **Notice:** ZeRO-1 is said to save 4 times and ZeRO-2 8 times. These are limits for infinitely many
# ranks; look at the line for 8 ranks. Only ZeRO-3 saves N times on N ranks.
#
# What does dividing cost? Instead of all-reducing gradients, ranks gather what they do not own. Here
# is what a step sends, by phase.

# %%
lab.show_traffic()

# %% [markdown]
# **Notice:** ZeRO-1 and -2 send the two halves of DDP's all-reduce, the second one after the step,
# when the parameters are new. ZeRO-3 gathers every parameter twice. Add up each line: how many Ψ
# does a stage send in a step? Notebook 03 measures it.

# %% [markdown]
# ## Activations
#
# Backward needs what forward computed. For one sequence of 4096 tokens, Llama-2-7B saves 25 GB,
# and its weights have only 13. No ZeRO stage divides activations.
#
# Guess, before you count: a GPT-2 block works on s·b·h numbers, where s is the sequence length, b
# the batch and h the hidden size. How many bytes does it save for each of them, with 1024 tokens,
# h = 768, a = 12 heads and attention that is not fused?

# %%
# A guess, for exercise 1.4
### BEGIN SOLUTION
my_guess = 60
### END SOLUTION
labs.guess("1.4", "activations of a GPT-2 layer, in s·b·h", my_guess)

# %% [markdown]
# Here is every tensor that one real GPT-2 block saves, each as a multiple of s·b·h. Two of them and
# a mask grow with s² instead: the **scores**, one number for each of a heads and each pair of
# tokens, so a·b·s² numbers in all. **Fused** attention (FlashAttention) computes the scores in
# pieces and never writes them to memory. In fp32 no GPU's kernel does so where query heads share
# keys, as in Llama 3: an H200 kept all scores.

# %%
lab.show_saved_tensors()

# %% [markdown]
# ### Exercise 1.4 · What one layer saves
#
# *Difficulty 3 of 5 · 10 minutes · target: a real block's bytes, without the norms' statistics*
#
# Your formula has two terms. First sum the coefficients of the s·b·h rows. The attention scores
# grow with s², so they get a term of their own: a multiple of a·b·s² bytes. Leave out the norms'
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
# <details><summary>Hint</summary>
#
# Which rows have a shape with s twice? Those three are the scores. All other rows, but for the four
# of means and deviations, are multiples of s·b·h.
#
# Outline: (1) add up the last column over the rows of the first kind; (2) for the scores, count
# bytes for each of a·b·s² elements: two tensors of 16-bit numbers, and a mask of one byte; (3) with
# fused attention the second term is 0.
#
# </details>

# %% [markdown]
# ## What the loss holds
#
# A head makes the **logits**, one number for each word of the vocabulary and each token. For 8192
# tokens of Llama-3-8B these are a billion numbers. Cross-entropy turns them into log-probabilities,
# in fp32 even where the model is in bf16. The memory meter counted what a step of a small Llama
# holds for each logit.

# %%
lab.show_logits()

# %% [markdown]
# When forward has ended, log-softmax is kept: 4 bytes. At the peak, in backward, two gradients are
# there as well, that of log-softmax and that of the logits. They are fp32, too: 12 bytes in all.

# %% [markdown]
# ### Exercise 1.4, second half · The activations of a model
#
# *Difficulty 3 of 5 · 10 minutes · target: bytes at the peak, for four models*
#
# Attention is fused. Without checkpointing all layers keep everything, and the loss adds 12 bytes
# for each of batch × sequence × vocabulary logits.
#
# With **checkpointing** a layer keeps only its input, in 16 bits. To these inputs add the larger of
# two: the loss, or one layer that backward computes again. They are never there together.

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
# <details><summary>Hint</summary>
#
# Which layers are whole at the moment of the peak, and which have only their input? A 16-bit input
# of a layer has s·b·h numbers.
#
# Outline: (1) one layer, from your first function, and the loss; (2) without checkpointing: all
# layers and the loss; (3) with it: all inputs, and `max` of a layer and the loss.
#
# </details>

# %%
lab.show_layer_activations(layer_activations)

# %% [markdown]
# **Notice:** your formula is that of Korthikanti et al., sbh(34 + 5as/h). It counts *bytes*, and is
# often doubled by mistake. Llama's layer differs: it has no dropout, but RMSNorm in fp32 and a wider
# feed-forward part.

# %%
lab.show_activations(activations)

# %% [markdown]
# **Notice:** with a vocabulary of 128,256 the loss takes almost six times as many bytes as all 32
# checkpoints. So with checkpointing the peak is at the loss. The last line is predicted from every
# tensor that PyTorch allocates, final norm included: your formula is less than 2 % below it.

# %% [markdown]
# ## Longer sequences
#
# Models are trained with ever longer sequences: 4k tokens for Llama 2, 128k for Llama 3.1. Which
# parts of your formula grow with s, and which with s²? The table calls your functions.

# %%
lab.show_sequence_lengths(layer_activations, activations)

# %% [markdown]
# **Notice:** eager attention grows with s², and at 8k it takes more than any GPU has. With fused
# attention memory grows with s alone, but 16k tokens nearly fill an A100, even without model states.
# From there on, training needs checkpointing. At 128k even that takes 84.7 GB. But 50.3 of these are
# not the layers': they are 12 bytes for each logit.

# %% [markdown]
# **Chunked cross-entropy** computes head and loss for a few thousand tokens at a time, and their
# gradients at once, so the logits of all tokens are never there together. The last column has no
# logits: 52.6 GB, as the peak moves to a layer. Libraries have it, for example
# *[Liger Kernel](https://github.com/linkedin/Liger-Kernel)*. What is left grows with s too. So for still
# longer sequences, or larger models, the sequence itself is sharded among ranks (notebook 07a).

# %% [markdown]
# ## What checkpointing costs
#
# Checkpointing keeps a block's input alone, so backward must compute the block again before it can
# use what was dropped.
#
# Guess: how many times the operations of a step without checkpointing does a step with
# checkpointing need?

# %%
# A guess, for exercise 1.5
### BEGIN SOLUTION
my_guess = 1.5
### END SOLUTION
labs.guess("1.5", "a step with checkpointing, as a multiple of one without", my_guess)

# %% [markdown]
# ### Exercise 1.5 · The operations of a step
#
# *Difficulty 2 of 5 · 10 minutes · target: the FLOPs that PyTorch counts*
#
# In forward, each parameter of a matrix is multiplied and added once per token: 2 operations
# (FLOPs). Backward does that twice, for the gradients of input and weight.
#
# What runs again? Only blocks are checkpointed, not the head. And PyTorch stops when it has what
# backward needs: the *input* of a block's last matrix, not its output.

# %%
# Exercise 1.5: the operations of a step
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
# **Notice:** 8/6, the quoted "33 % more", is what you get without a head and if all of each block
# ran again. PyTorch computes less: compare the first bar with the second. The grey bar is the time
# on this machine, which differs from run to run; recomputing also moves memory.

# %%
lab.show_checkpointing_memory(cost)

# %% [markdown]
# **Notice:** this is what checkpointing saves for its price. The ticks are predicted from this
# model's configuration alone.

# %% [markdown]
# ## Does it fit?
#
# A rented node that runs out of memory in its first step costs money and teaches little. Your
# functions know the model states and the activations. Two more numbers are needed:
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
# *Difficulty 2 of 5 · 10 minutes · target: six jobs to the byte, two of them drawn at random*
#
# Guess first: how many GB per rank does a 13B model need in all, with 12 bytes per parameter and
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


# %%
lab.check_bytes_left(bytes_left)

# %%
lab.show_bytes_left(bytes_left)

# %% [markdown]
# **Notice:** "84 GB for 7B" is less than the 85.1 GB of an A100-80, and Llama-2-7B has even fewer
# than 7 billion parameters. Does your function say that 7B fits under DDP? If not, what takes the
# rest? And how far is 13B with ZeRO-3 from the limit?

# %%
lab.show_self_check(bytes_left, per_rank, activations)

# %% [markdown]
# **Notice:** below each estimate of yours is a prediction that counts every buffer. DDP copies all
# gradients into its **buckets**; ZeRO-3 gathers a block's parameters before it uses them; AdamW's
# foreach step needs a temporary as large as a moment, the grey part. So 7B under DDP needs much more
# than you estimated; 13B with ZeRO-3 takes 55 of 85 GB.

# %% [markdown]
# ## Predict, then measure
#
# An estimate that nobody has measured is a guess. Now we train on real ranks: a small GPT-2 in fp32
# with AdamW, plain on one rank, then under DDP and under FSDP2 (ZeRO-3 in PyTorch) on several. Every
# allocation is recorded. GPUs are measured where there are some; on a single one, 2 ranks share it.
# After backward all states are in memory.

# %% [markdown]
# ### Exercise 1.7 · What a rank holds after backward
#
# *Difficulty 2 of 5 · 10 minutes · target: to the byte what ranks hold, on 1, 2 and 4 ranks*
#
# **Buffers** are what communication keeps: under DDP a copy of the gradients, one number for each.
# FSDP2 keeps none after backward. AdamW's step counters, a number for each tensor, are left out.

# %%
# Exercise 1.7: what a rank holds after backward
def rank_states(count, strategy, ranks):
    """Bytes: (parameters, gradients, optimizer state, buffers) of one rank in fp32 with AdamW.
    strategy: "plain", "DDP" or "FSDP2"."""
    ### BEGIN SOLUTION
    stage = 3 if strategy == "FSDP2" else 0
    buckets = 4 * count if strategy == "DDP" else 0
    return *per_rank(count, (4, 4, 8), stage, ranks), buckets
    ### END SOLUTION


# %%
lab.check_rank_states(rank_states)

# %% [markdown]
# The preset's model has 1.2 million parameters on a laptop, 59 million on one GPU and 202 million on
# a node. How many MB will a rank hold under DDP at its peak, activations of one sequence
# of 16 tokens included?

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
# **Notice:** your formula is right to the byte, except for AdamW's step counters. Where a few bytes
# are still not explained, DDP or FSDP2 keeps them. A GPU's allocator rounds each tensor up.

# %%
lab.show_peak(measured)

# %% [markdown]
# **Notice:** on a CPU the prediction equals the measured peak. Each rank trained one sequence of 16
# tokens, so nearly all is states. DDP needs more than one rank alone, by its buckets. FSDP2 divides
# parameters, gradients and moments among its ranks, and adds the gathered block in its buffers.

# %% [markdown]
# ## What else takes memory
#
# On a GPU three numbers differ. **Allocated** is what tensors take, **reserved** is what PyTorch's
# allocator holds from CUDA, and `nvidia-smi` shows all memory of the process. The error "out of
# memory" comes when the last number reaches the GPU's capacity. A CPU has none of the three, so on a
# laptop they are computed.

# %%
lab.show_gpu_memory(PRESET)

# %% [markdown]
# What makes them differ has names. On an H200, nine runs of one rank with 1B to 8B reserved 8 to 40 %
# more than their tensors took at the peak: that is room to plan for.

# %%
lab.show_other_memory()

# %% [markdown]
# ## Explore
#
# The explorer also counts buckets, gathered parameters and the temporaries of AdamW's foreach step.
# Find the largest model that 8 A100-80 train under ZeRO-3 with checkpointing, then turn
# checkpointing off.

# %%
lab.explore_memory()

# %% [markdown]
# ## A dry run
#
# How far can you trust a prediction for a job that you cannot run? A **dry run** checks it: it builds
# the real modules with fake tensors, which have shapes but no numbers, on ranks that do not exist,
# and records one step's allocations. Here is Llama-3-70B under FSDP2 on 8 to 1024 ranks: a dry run
# for 1024 ranks, a prediction for all. It takes about ten seconds.

# %%
lab.show_scaling(traced=(1024,))

# %% [markdown]
# **Notice:** states shrink as ranks are added; activations and gathered parameters do not. So from
# some number of ranks on, more ranks save almost nothing.

# %% [markdown]
# ## Optional: measure what autograd saves, without the lab
#
# Your formula says 34sbh for a GPT-2 block; a block with Llama-3's proportions saved 49. Which part
# makes the difference? It needs no formula for each part: torch calls two functions of yours, **saved
# tensor hooks**, for whatever autograd saves. `pack` gets a tensor; what it returns is kept in its
# place, and backward gets it from `unpack`.

# %% [markdown]
# | call | returns |
# |:--|:--|
# | `torch.autograd.graph.saved_tensors_hooks(pack, unpack)` | a context: the hooks are called for what is saved inside it |
# | `tensor.untyped_storage()` | the memory behind a tensor; its views share it |
# | `storage.data_ptr()`, `storage.nbytes()` | its address, and its bytes |
#
# `pack` must not return the tensor itself, which may keep the graph that keeps it. Then neither is
# ever freed. `tensor.detach()` shares the memory and knows no graph.

# %%
def look(saved):
    print(f"saved: {saved.nbytes} bytes, in a storage of {saved.untyped_storage().nbytes()}")
    return saved.detach()


x = torch.ones(1000, requires_grad=True)
with torch.autograd.graph.saved_tensors_hooks(look, lambda kept: kept):
    y = torch.nn.functional.silu(x[:10])

# %% [markdown]
# ### Exercise 1.8 · Bytes for backward
#
# *Difficulty 4 of 5 · 30 minutes · target: to the byte what twelve forwards leave; afterwards none of
# it stays*
#
# `forward` takes nothing and returns a tensor. `held` lists tensors that are in memory anyway:
# parameters and inputs. A storage counts once, and whole, even if only a view of it is saved. Of a
# checkpointed block only its input is saved.
#
# Guess first: GPT-2's two norms save 4sbh. How many s·b·h do Llama's two save?

# %%
# A guess, for exercise 1.8
### BEGIN SOLUTION
my_guess = 4
### END SOLUTION
labs.guess("1.8", "s·b·h that the two norms of Llama save", my_guess)

# %%
# Exercise 1.8: bytes for backward
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
# What tells two storages apart is their address. Which addresses must not count?
#
# Outline: (1) `pack` looks at the storage behind its tensor and remembers its address and its bytes;
# (2) call `forward` inside the context; (3) add up the bytes of all addresses that no tensor of `held`
# has. Remember numbers only: a list of tensors that `pack` fills keeps the graph, which keeps `pack`,
# which keeps the list.
#
# </details>

# %%
lab.show_saved_parts(bytes_for_backward, layer_activations)

# %% [markdown]
# **Notice:** your 34 is 4 + 11 + 19. Llama's attention saves less than GPT-2's: its keys and values
# are a quarter as wide, and it has no dropout. But RMSNorm computes in fp32, so each norm saves an
# fp32 copy of its input, 4sbh, and its result, 2sbh. SwiGLU saves its input and four tensors of 3.5
# times the model's width, 4 · 7sbh. Checkpointed, either block saves its input alone.

# %% [markdown]
# ## I can …
#
# - count a Llama's parameters from its configuration
# - say which recipe a figure like "84 GB" assumes
# - write down what each ZeRO stage leaves on a rank, and on how many ranks it fits
# - say what mixed precision halves, and what it does not
# - say why the loss matters once checkpointing is on
# - name four things that `nvidia-smi` shows and my formula does not

# %% [markdown]
# ## How it usually goes wrong
#
# - **A figure without its recipe**: 84 and 112 GB are the same model.
# - **GB confused with GiB**: the 7 % decide whether the largest job fits.
# - **The head forgotten, or counted twice** when it is tied.
# - **Bytes taken for elements**: 34sbh is in bytes already.
# - **DDP's buckets, the loss's 12 bytes a logit and the optimizer's temporaries forgotten**: the job
#   fits on paper and runs out of memory in the first step.

# %% [markdown]
# ## What to read
#
# | read | by | a question |
# |:--|:--|:--|
# | [ZeRO](https://arxiv.org/abs/1910.02054) | S. Rajbhandari et al., SC 2020, sections 3 and 5 | Which row of table 1 would your cluster be? |
# | [Transformer Math 101](https://blog.eleuther.ai/transformer-math/) | EleutherAI, 2023 | It counts 12 bytes of optimizer state, your recipe "fp32" has 8. Which bar of your chart shows the other 4? |
# | [Reducing Activation Recomputation](https://arxiv.org/abs/2205.05198) | V. Korthikanti et al., 2022, section 4 | What does only sequence parallelism divide? |
# | [torch.utils.checkpoint](https://docs.pytorch.org/docs/stable/checkpoint.html) | PyTorch | What does `early_stop` leave out? |

# %% [markdown]
# ## What comes next
#
# Notebook 02, Manual DDP: what makes N copies of a model behave like one.
