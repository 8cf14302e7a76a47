# %% [markdown]
# # 01 · Memory math
#
# **75 minutes** · any machine with 2 cores, no GPU
#
# Before you rent a GPU you can say what each rank of a training job will hold. You write the
# formulas, one for each kind of byte, and compare every one with real models, real tensors and
# ranks that really train. At the end your own function answers the question: does it fit?
#
# *On a rented 8×A100 node: 1 minute of compute, about $0.37.*

# %% [markdown]
# ## You will be able to
#
# - count a model's parameters from its configuration, exactly;
# - say how many bytes a recipe needs for each, and each rank under ZeRO-1, -2 and -3;
# - estimate activations, and say what checkpointing costs and saves;
# - decide whether a job fits on a GPU, and name what your estimate leaves out.

# %% [markdown]
# ## The models
#
# A **configuration** lists a model's sizes, and everything else follows from them. Below, `m` stands
# for one column of the table, for example `m.hidden`. Throughout, a GB is 10⁹ bytes and a GiB 2³⁰,
# which is 7 % more: a GPU of 80 "GB" really has 80 GiB, less what the driver takes.

# %%
import torch

import labs
import labs.memory_math as lab

labs.warm_up()
PRESET = lab.preset("laptop")  # for what is measured; add layers=4, or another size, to change it
MODELS = lab.model_sizes()
lab.show_models()

# %% [markdown]
# ## Parameters
#
# A decoder is an embedding, `m.layers` equal blocks, a final norm and a head. Here is what a block
# of Llama-3-8B holds. Llama-3 uses **grouped-query attention**: its 32 query heads share 8 key and
# value heads, each `m.head_dim` wide. Its feed-forward part, SwiGLU, has three matrices; each RMSNorm
# has one vector.

# %%
lab.show_block("Llama-3-8B")

# %% [markdown]
# GPT-2 is older. It has as many key heads as query heads (all in one matrix, `c_attn`), two
# feed-forward matrices, biases, and LayerNorms, whose two vectors are a weight and a bias. Qwen2 is a
# Llama with biases for queries, keys and values. `m.family` is `"gpt2"`, `"llama"` or `"qwen2"`; `m.qkv_bias`,
# `m.out_bias` and `m.mlp_bias` are True or False.

# %%
lab.show_block("GPT-2")

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
# Now the whole model. The embedding has a row of width `m.hidden` for each of `m.vocabulary` tokens;
# GPT-2 also learns such a row for each of `m.positions` (0 in the other families). A **tied** head is
# the embedding itself, so a model with `m.tied` holds that matrix once. Guess first: what percentage
# of Llama-3-8B's parameters is in no block?

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


lab.check_parameters(block_parameters, model_parameters)

# %% [markdown]
# The check builds each model on PyTorch's **meta** device, where tensors have shapes and no memory,
# and compares exactly, for Llama-3-70B's 70,553,706,496 parameters as for three small models whose
# sizes it draws at random each time.

# %%
lab.show_outside_blocks(block_parameters, model_parameters)

# %% [markdown]
# **Notice:** a large vocabulary matters most in a small model. In Llama-3-8B the embedding and the
# head are 13 % of all parameters; in Llama-3-70B, with the same vocabulary, they are 3 %.

# %% [markdown]
# ## Bytes per parameter
#
# For each parameter, training keeps the weight, its gradient, and the optimizer's state: Adam's two
# **moments**. In 16 bits small updates are rounded away, so many recipes keep a **master copy** of the
# weights in fp32 and count it as optimizer state. A recipe is a choice of types; `dtype.itemsize` is
# the number of bytes of one element.

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


lab.check_bytes_per_parameter(bytes_per_parameter)

# %%
lab.show_recipes(bytes_per_parameter, RECIPES)

# %% [markdown]
# **Notice:** full bars are real tensors after a step of `torch.optim.AdamW`. Mixed precision with a
# master copy takes as many bytes for these states as fp32: it is faster, not smaller. And
# `model.bfloat16()` alone takes 8 bytes, because the moments silently take the weights' type.

# %%
lab.show_quoted_figures(bytes_per_parameter, RECIPES)

# %% [markdown]
# **Notice:** "7B needs 84 GB" and "7B needs 112 GB" are both right, for different recipes. Much
# material adds "28 GB for the optimizer" to the 12-byte recipe. But 28 GB is two bf16 moments; fp32
# moments take 56 GB. Before you use such a figure, ask for its recipe.

# %% [markdown]
# ## States divided among ranks
#
# Data parallelism repeats all of these states on every rank. **ZeRO** divides them among the N ranks
# instead: stage 1 divides the optimizer state, stage 2 the gradients too, stage 3 the parameters too.
# Stage 0 is plain data parallelism.
#
# How many GB does each of 8 ranks hold of a 70B model in the 12-byte recipe, under ZeRO-2?

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


lab.check_per_rank(per_rank)

# %%
lab.show_figure_1(per_rank)

# %% [markdown]
# **Notice:** this is figure 1 of the ZeRO paper: 120, 31.4, 16.6 and 1.9 GB. What a stage does not
# divide soon dominates: under ZeRO-1 nearly all that remains are the weights and gradients, 4 bytes
# per parameter.

# %%
lab.show_70b(per_rank)

# %% [markdown]
# **Notice:** with ZeRO-2 a rank holds 140 + 17.5 + 70 = 227.5 GB. Often 210 is printed, which leaves
# out the gradients that each rank still owns. Even ZeRO-3's 105 GB are more than an A100 has.

# %%
lab.show_savings(per_rank)

# %% [markdown]
# **Notice:** ZeRO-1 is said to save 4 times and ZeRO-2 8 times. These are limits for infinitely many
# ranks; on 8 ranks it is 2.9 and 4.3 times. Only ZeRO-3 saves N times on N ranks.

# %% [markdown]
# ## Activations
#
# Backward needs what forward computed. Here is every tensor that one real GPT-2 block saves, each
# as a multiple of s·b·h, where s is the sequence length, b the batch and h the hidden size. Two of
# them and a mask grow with s² instead: the **scores**, one number for each of a heads and each pair
# of tokens, so a·b·s² numbers in all.

# %%
lab.show_saved_tensors()

# %% [markdown]
# Your formula has two terms. First sum the coefficients of the s·b·h rows. The attention scores grow
# with s², so they get a term of their own: a multiple of a·b·s² bytes. Leave out the norms'
# statistics. **Fused** attention (FlashAttention) computes the scores in pieces and never writes them
# to memory.
#
# How many times s·b·h does a block of GPT-2 save with eager attention, 1024 tokens, h = 768, a = 12?

# %%
# A guess, for exercise 1.4
### BEGIN SOLUTION
my_guess = 60
### END SOLUTION
labs.guess("1.4", "activations of a GPT-2 layer, in s·b·h", my_guess)

# %%
# Exercise 1.4: what one layer saves
def layer_activations(batch, sequence, hidden, heads, fused):
    """Bytes that a GPT layer in 16 bits, with dropout, saves for backward."""
    ### BEGIN SOLUTION
    scores = 0 if fused else 5 * heads * batch * sequence**2
    return 34 * sequence * batch * hidden + scores
    ### END SOLUTION

# %% [markdown]
# Now a whole model with fused attention. Without checkpointing all layers keep everything, and the
# loss adds the **logits**: batch × sequence × vocabulary numbers in fp32. With **checkpointing** a
# layer keeps only its input, in 16 bits. To these inputs add the larger of two: the logits, or one
# layer that backward computes again. The two are never in memory at the same time.

# %%
# Exercise 1.4, second half: the activations of a model at its peak
def activations(m, batch, sequence, checkpointing):
    """Bytes in 16 bits, logits in fp32, for m.layers layers with fused attention."""
    ### BEGIN SOLUTION
    layer = layer_activations(batch, sequence, m.hidden, m.heads, fused=True)
    logits = 4 * batch * sequence * m.vocabulary
    if not checkpointing:
        return m.layers * layer + logits
    kept = 2 * batch * sequence * m.hidden
    return m.layers * kept + max(layer, logits)
    ### END SOLUTION


lab.check_activations(layer_activations, activations)

# %%
lab.show_layer_activations(layer_activations)

# %% [markdown]
# **Notice:** your formula, sbh(34 + 5as/h), is that of Korthikanti et al. It counts *bytes*, and
# is often doubled by mistake. Fused attention removes more than half of it here. Llama's layer
# differs: it has no dropout, but RMSNorm in fp32 and a wider feed-forward part. The 56sbh that is
# quoted for Llama-3 counts one more tensor of that width, 7sbh; PyTorch no longer saves it.

# %%
lab.show_activations(activations)

# %% [markdown]
# **Notice:** with a vocabulary of 128,256 the logits alone take twice as many bytes as all 32
# checkpoints. So with checkpointing the peak is at the loss.

# %% [markdown]
# ## What checkpointing costs
#
# In forward, each parameter is multiplied and added once per token: 2 operations (FLOPs). Backward
# does that twice, for the gradient of the layer's input and of its weight. Checkpointing runs
# forward again.
#
# How many times the operations of a step without checkpointing does a step with checkpointing need?

# %%
# A guess, for exercise 1.5
### BEGIN SOLUTION
my_guess = 1.5
### END SOLUTION
labs.guess("1.5", "a step with checkpointing, as a multiple of one without", my_guess)

# %%
# Exercise 1.5: the operations of a step
def step_flops(parameters, tokens, checkpointing):
    """FLOPs of forward and backward in the matrices of a model."""
    ### BEGIN SOLUTION
    forward = 2 * parameters * tokens
    backward = 2 * forward
    return forward + backward + (forward if checkpointing else 0)
    ### END SOLUTION


lab.check_step_flops(step_flops)

# %%
cost = lab.measure_checkpointing(PRESET)
lab.show_checkpointing_cost(cost, step_flops)

# %% [markdown]
# **Notice:** 8/6 is where the quoted 33 % come from. In fact fewer products are computed again: not
# the head's, and not a block's last one, because PyTorch stops as soon as it has what backward needs.
# The seconds are those of this machine. They differ from run to run, and recomputing also moves
# memory.

# %%
lab.show_checkpointing_memory(cost)

# %% [markdown]
# **Notice:** this is what checkpointing saves for its price. The ticks are predicted from this
# model's configuration alone.

# %% [markdown]
# ## Does it fit?
#
# `gpu.usable` is the memory that CUDA offers, in bytes. CUDA and NCCL take some of it before the first
# tensor: `lab.overhead(ranks)`. The rest is for model states and activations; use your functions for
# these. Guess first: how many GB per rank does a 13B model need in all, with 12 bytes per parameter
# and ZeRO-3 on 4 GPUs?

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


lab.check_bytes_left(bytes_left)

# %%
lab.show_bytes_left(bytes_left)

# %% [markdown]
# **Notice:** 13B does not fit under DDP, and under ZeRO-3 it fits easily. 7B under DDP, "84 GB",
# seems to fit on a GPU of 80 GB with less than 1 GB left, because the GPU has GiB, and Llama-2-7B
# fewer than 7 billion parameters. Would you rent it?

# %%
lab.show_self_check(bytes_left, per_rank, activations)

# %% [markdown]
# **Notice:** below each estimate of yours is a prediction that counts every buffer. DDP copies all
# gradients into its **buckets**; ZeRO-3 gathers a block's parameters before it uses them; PyTorch's
# AdamW needs a temporary as large as a moment. So 7B under DDP runs out of memory in the first step;
# 13B with ZeRO-3 takes 54 of 85 GB.

# %% [markdown]
# ## Predict, then measure
#
# Now on real ranks: a small GPT-2 in fp32 with AdamW, plain on one rank, then under DDP and under
# FSDP2 (ZeRO-3 in PyTorch) on several. Every allocation is recorded; on a GPU the tensors are as large
# as on a CPU. After backward all states are in memory. **Buffers** are what communication keeps: under
# DDP a copy of the gradients, one number for each. FSDP2 keeps none.

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


lab.check_rank_states(rank_states)

# %% [markdown]
# The preset's model has 1.2 million parameters. How many MB will a rank hold under DDP at its peak,
# activations included?

# %%
# A guess, for exercise 1.7
### BEGIN SOLUTION
my_guess = 40
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
# **Notice:** your formula is right to the byte, except for AdamW's step counters. The few bytes that
# are still not explained belong to DDP or FSDP2.

# %%
lab.show_peak(measured)

# %% [markdown]
# **Notice:** the prediction equals the measured peak. The memory of so small a model is mostly
# activations, which sharding does not divide, so FSDP2 saves little here. The same three bars for 13B
# would be nearly all states.

# %% [markdown]
# ## What else takes memory
#
# On a GPU three numbers differ. **Allocated** is what tensors take, **reserved** is what PyTorch's
# allocator holds from CUDA, and `nvidia-smi` shows all memory of the process. The error "out of
# memory" comes when the last number reaches the GPU's capacity.

# %%
lab.show_other_memory()

# %% [markdown]
# ## Explore
#
# The explorer also counts buckets, gathered parameters and the optimizer's temporaries. Find the
# largest model that 8 A100-80 train under ZeRO-3 with checkpointing, then turn checkpointing off.

# %%
lab.explore_memory()

# %% [markdown]
# ## A dry run
#
# How far can you trust a prediction for a job that you cannot run? A **dry run** checks it, for any
# model and strategy: it builds the real modules with fake tensors, which have shapes but no numbers,
# on ranks that do not exist, and records one step's allocations. Here is Llama-3-70B under FSDP2 on 8
# to 1024 ranks, from one process on this machine: a dry run for 1024 ranks, a prediction for all.

# %%
lab.show_scaling(traced=(1024,))

# %% [markdown]
# **Notice:** states shrink as ranks are added; activations and gathered parameters do not. So from
# some number of ranks on, more ranks save almost nothing.

# %% [markdown]
# ## I can …
#
# - [ ] count a Llama's parameters from its configuration
# - [ ] say which recipe a figure like "84 GB" assumes
# - [ ] write down what each ZeRO stage leaves on a rank
# - [ ] say why logits matter once checkpointing is on
# - [ ] name four things that `nvidia-smi` shows and my formula does not

# %% [markdown]
# ## How it usually goes wrong
#
# - **A figure without its recipe**: 84 and 112 GB are the same model.
# - **GB confused with GiB**: the 7 % decide whether the largest job fits.
# - **The head forgotten, or counted twice** when it is tied.
# - **Bytes taken for elements**: 34sbh is in bytes already.
# - **DDP's buckets and the logits forgotten**: the job fits on paper and runs out of memory in the
#   first step.

# %% [markdown]
# ## What to read
#
# - S. Rajbhandari et al., [ZeRO](https://arxiv.org/abs/1910.02054), SC 2020, sections 3 and 5.
#   *Which row of table 1 would your cluster be?*
# - V. Korthikanti et al., [Reducing Activation Recomputation](https://arxiv.org/abs/2205.05198),
#   2022, section 4. *What does sequence parallelism divide that tensor parallelism does not?*
# - [torch.utils.checkpoint](https://docs.pytorch.org/docs/stable/checkpoint.html), `early_stop`.
#   *Which product of a block does it not compute again?*

# %% [markdown]
# ## What comes next
#
# Notebook **02 Manual DDP**: what makes N copies of a model behave like one.
