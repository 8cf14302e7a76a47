# %% [markdown]
# # 04 · FSDP
#
# **120 minutes** · any machine with 2 cores; on GPUs it shows speed too
#
# Fully sharded data parallelism (FSDP) is ZeRO-3 as torch ships it. You apply `fully_shard`, see
# that it does what your ZeRO-3 does, and choose its units. Then you train a model for which DDP has
# no memory, under a limit at which a rank's allocation fails.
#
# *On a rented 8×A100 node: 5 minutes of compute, about $1.86.*

# %% [markdown]
# ## You will be able to
#
# - shard a transformer with `fully_shard`, and say what it holds and sends;
# - choose units by a rule;
# - predict the largest model that fits, and find it;
# - trade memory for compute, and say what it cost.

# %% [markdown]
# ## What is trained here

# %%
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import labs
import labs.fsdp as lab

labs.warm_up()
PRESET = lab.preset()  # or lab.preset("laptop", ranks=4): any size can be changed
PRESET

# %% [markdown]
# ## From ZeRO-3 to `fully_shard`
#
# `fully_shard(module)` makes a module a **unit**: its parameters become shards (`DTensor`), are
# gathered just before its forward and backward, and freed after; its gradients are
# reduce-scattered. A parameter that already belongs to a unit stays with that unit, so shard the
# inner modules first, and the root last.
#
# The parameters are *new objects* afterwards. `mesh=lab.mesh()` says which ranks share: here all
# of them.

# %%
# Exercise 4.1: each block is a unit, what is left belongs to the root
def shard(model, optimizer_class, **settings):
    """A strategy, as in notebook 03; lab.blocks(model) are the transformer's blocks."""
    ### BEGIN SOLUTION
    for block in lab.blocks(model):
        fully_shard(block, mesh=lab.mesh())
    fully_shard(model, mesh=lab.mesh())
    optimizer = optimizer_class(model.parameters(), **settings)
    return model, optimizer
    ### END SOLUTION


lab.check_shard(shard)

# %% [markdown]
# The check trains a GPT-2 of width 33 on 2 and 4 ranks, neither of which divides 33, and compares
# it with a reference that one process trains on the whole batch. Then it counts bytes by category
# and collectives by kind.
#
# In fp32 with AdamW, DDP holds 16Ψ bytes and its buckets. How many MB will one of the ranks hold
# after backward under your strategy? The preset's GPT-2 has Ψ = 1.2 million.

# %%
# A guess, for exercise 4.1
### BEGIN SOLUTION
my_guess = 12
### END SOLUTION
labs.guess("4.1", "MB per rank after backward, fully_shard", my_guess)

# %% [markdown]
# Compare it with the ZeRO-3 that you built. The next cell takes your `zero3` from notebook 03's file
# and checks it; if it does not pass, the cell takes the worked solution's.

# %%
zero3 = lab.your_zero3()
zero3

# %%
lab.compare_with_zero3(zero3, shard, PRESET)

# %% [markdown]
# **Notice:** the black ticks are ZeRO's formulas for stages 0 and 3: 16Ψ and 16Ψ/N bytes, 2Ψ and 3Ψ
# elements. `fully_shard` *is* your ZeRO-3, with one call less, because it keeps the root gathered
# from forward to backward. With the root freed in between it sends the same bytes in as many calls.
# DDP's buffers are its buckets, a second copy of the gradients.

# %% [markdown]
# ## Which units?
#
# One unit for the whole model means two collectives, and everything gathered at once. One per linear
# layer means little gathered, and many collectives, each with a fixed price.
#
# A step gathers the root once, because it stays until backward has ended, and every other unit twice.
# Each is reduce-scattered once. The chart above shows one unit per block. How many collectives will
# it be with one unit for each of a block's four linear layers?

# %%
# A guess, for exercise 4.2
### BEGIN SOLUTION
my_guess = 60
### END SOLUTION
labs.guess("4.2", "collectives per step, each linear", my_guess)

# %% [markdown]
# While one unit computes, the next is already being gathered. So two *neighbours* and the root are
# whole at the same time.

# %%
# Exercise 4.2: what a wrapping costs
def cost(units):
    """units: parameters of each unit, the root's first, then in the order of forward.
    Returns (collectives of a step, bytes gathered at once), in fp32."""
    ### BEGIN SOLUTION
    root, *others = units
    collectives = 1 + 2 * len(others) + len(units)
    pairs = [first + second for first, second in zip(others, others[1:])]
    return collectives, 4 * (root + max(pairs or others or [0]))
    ### END SOLUTION


lab.check_cost(cost)

# %%
wrappings = {"whole model": lambda model: [], "each block": lab.blocks, "each linear": lab.linears}
compared = lab.compare_wrappings(wrappings, PRESET)
lab.show_wrappings(compared, wrappings, cost)

# %% [markdown]
# **Notice:** from the whole model to blocks, the gathered bytes (buffers) shrink most. From blocks to
# linear layers they shrink little more, and the collectives multiply. Buffers may be twice what
# `cost` counts, because a unit arrives in one flat buffer and its parameters are copied out of it.
# Few tokens are trained here, because activations would hide the buffers. Milliseconds on a CPU say
# little about a GPU's.

# %% [markdown]
# ## The rule
#
# Every collective has a fixed price, so take the *fewest* that fit: the largest units whose
# gathered bytes have room next to shards and activations. Often that is one unit for each block.

# %%
# Exercise 4.3: choose a wrapping
def choose(wrappings, free):
    """wrappings: name -> units, as in `cost`. free: bytes for gathered parameters.
    Returns the name of the wrapping with the fewest collectives that fits, or None."""
    ### BEGIN SOLUTION
    fits = [name for name, units in wrappings.items() if cost(units)[1] <= free]
    return min(fits, key=lambda name: cost(wrappings[name])[0], default=None)
    ### END SOLUTION


lab.check_choose(choose)

# %% [markdown]
# ## Out of memory, for real
#
# From here on a rank has a **limit**: `launch(..., memory_limit=bytes)` lets it take no more than
# that beyond what it starts with, and the allocation that would exceed it fails. On a GPU the same
# option sets a fraction of the device's memory.
#
# All writable memory counts, so Python's objects and thread stacks too. Four ranks
# train a GPT-2 with 8 layers of width 160, first with DDP, then with your `shard`.

# %%
LIMIT = 47_000_000  # bytes for each rank
lab.train_under_limit({"DDP": lab.ddp, "FSDP": shard}, LIMIT)

# %% [markdown]
# **Notice:** the hatched bar is what DDP would have needed, by formula. The red line is the limit at
# which the operating system refused DDP's allocation. FSDP trains the same model on the same data
# under the same limit, and its measured bar ends at the formula's tick.

# %% [markdown]
# ## Compute instead of remember
#
# Now activations are the largest part. **Activation checkpointing** keeps only a block's input, and
# runs the block again when backward reaches it. Each block gets a checkpoint of its own, because a
# single one around the model would bring all activations back at once.
#
# `checkpoint_wrapper(block)` returns a module that does so. `lab.blocks(model)` is the model's own
# list: the model runs what you put into it. Wrap first, then shard.

# %%
# Exercise 4.4: every block is computed again in backward
def checkpointed(model, optimizer_class, **settings):
    """A strategy: as `shard`, with activation checkpointing."""
    ### BEGIN SOLUTION
    blocks = lab.blocks(model)
    for number, block in enumerate(blocks):
        blocks[number] = checkpoint_wrapper(block)
    return shard(model, optimizer_class, **settings)
    ### END SOLUTION


lab.check_checkpointed(checkpointed)

# %% [markdown]
# And **CPU offload**: shards, gradients and optimizer state live in the host's memory; each unit
# travels to the GPU when it is gathered, and its gradient back. `pin_memory=False`, because there
# may be no GPU to pin memory for.

# %%
def offloaded(model, optimizer_class, **settings):
    policy = CPUOffloadPolicy(pin_memory=False)
    for block in lab.blocks(model):
        fully_shard(block, mesh=lab.mesh(), offload_policy=policy)
    fully_shard(model, mesh=lab.mesh(), offload_policy=policy)
    return model, optimizer_class(model.parameters(), **settings)


compared = lab.compare_strategies({
    "DDP": lab.ddp, "FSDP": shard, "FSDP + checkpointing": checkpointed,
    "FSDP + CPU offload": offloaded})
lab.show_memory_and_time(compared)

# %% [markdown]
# **Notice:** much material says checkpointing takes three times less memory for 30 % more time. The
# line below the chart says what it is here. The three counts activations alone, and grows with the
# layers, because only one block has all of its activations at a time. The 30 % counts arithmetic: a
# second forward, where backward costs two. Here collectives take much of FSDP's step, and they do not
# grow. Seconds on a CPU say little about a GPU's.

# %%
lab.show_offload(compared)

# %% [markdown]
# **Notice:** on CPU ranks nothing moves, so offload saves nothing, and its time is FSDP's up to noise.
# The table's bytes say what stays on a GPU, and what travels to the host and back. The code is the
# same on both.

# %% [markdown]
# ## The largest model that fits
#
# How many times more parameters than with DDP can be trained with FSDP and checkpointing, on four
# ranks, under the same limit?

# %%
# A guess, for exercise 4.4
### BEGIN SOLUTION
my_guess = 3
### END SOLUTION
labs.guess("4.4", "times larger than with DDP, FSDP + checkpointing", my_guess)

# %% [markdown]
# `lab.largest_model` first *predicts*, in layers: tensors as notebook 01's explorer does, plus
# what the process took in addition in two runs without a limit. Then it trains real models under
# the limit, larger and smaller, until one fits and the next one runs out of memory.

# %%
largest_ddp = lab.largest_model("DDP", lab.ddp, LIMIT)
largest_ddp

# %%
largest_fsdp = lab.largest_model("FSDP", shard, LIMIT)
largest_fsdp

# %%
largest_checkpointed = lab.largest_model("FSDP + checkpointing", checkpointed, LIMIT)
largest_checkpointed

# %%
lab.show_largest_models(compared, largest_ddp, largest_fsdp, largest_checkpointed)

# %%
lab.summary_table(compared, largest_ddp, largest_fsdp, largest_checkpointed)

# %% [markdown]
# **Notice:** prediction and trial agree within a layer; a formula is cheaper than a job that runs out
# of memory. FSDP's gain grows with the ranks, because states shrink as 1/N. Activations do not, so
# checkpointing has to shrink them.

# %% [markdown]
# ## Mixed precision
#
# A `MixedPrecisionPolicy` has two types. `param_dtype`: what is gathered and computed with.
# `reduce_dtype`: what gradients travel and are summed in. The shards that the optimizer updates stay
# as the model was built, in fp32.
#
# bf16 has fp32's range with fewer digits. So compute in bf16, and sum in fp32.

# %%
# Exercise 4.5: gather and compute in bf16, reduce in fp32
def mixed(model, optimizer_class, **settings):
    """A strategy: as `shard`, with mp_policy=MixedPrecisionPolicy(...) for every unit."""
    ### BEGIN SOLUTION
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in lab.blocks(model):
        fully_shard(block, mesh=lab.mesh(), mp_policy=policy)
    fully_shard(model, mesh=lab.mesh(), mp_policy=policy)
    optimizer = optimizer_class(model.parameters(), **settings)
    return model, optimizer
    ### END SOLUTION


lab.check_mixed(mixed)

# %%
lab.show_precision(shard, mixed)

# %% [markdown]
# **Notice:** shards and optimizer state stay as they are; activations and gathered bytes halve. On the
# wire, two gathers in bf16 and a reduction in fp32 are 2 + 2 + 4 bytes for a parameter, as many as
# the two passes of an fp32 all-reduce, 4 + 4.

# %% [markdown]
# fp16 has more digits than bf16 and a small range: its smallest number is 6e-8. A micro-batch of 256
# tokens that is part of a batch of 262,144 has small gradients. Which of them survive?

# %%
lab.count_underflow()

# %% [markdown]
# **Notice:** fp16 loses gradients to **underflow**: with the loss multiplied by 65,536 they are back
# (the optimizer must then divide). That is **loss scaling**. bf16 needs none, because it has fp32's
# range. The zeros that remain are exact cancellations. They come from rounding, so scaling the loss
# cannot bring them back.

# %% [markdown]
# ## Never whole
#
# So far every rank built the whole model first; a large one would not fit. On the **meta device** a
# tensor has a shape and no memory. So build there, shard, and only then call
# `to_empty(device=lab.device())`, which gives each rank uninitialised memory for its shards. Each
# module's `reset_parameters()` then draws the numbers.
#
# On a CPU every rank draws with its own generator, so equal seeds would give equal shards.

# %%
# Exercise 4.6: a model that no rank ever holds
def from_meta(make_model, optimizer_class, **settings):
    """make_model() builds the model. The numbers are drawn with another seed on each rank."""
    ### BEGIN SOLUTION
    with torch.device("meta"):
        model = make_model()
    shard(model, optimizer_class)
    model.to_empty(device=lab.device())
    torch.manual_seed(dist.get_rank())
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    optimizer = optimizer_class(model.parameters(), **settings)
    return model, optimizer
    ### END SOLUTION


lab.check_from_meta(from_meta)

# %% [markdown]
# ## Save shards, load on other ranks
#
# A **full** state dict gathers everything on one rank; of a **sharded** one each rank writes its part.
# `get_state_dict(module, optimizer)` gives two dictionaries with this rank's shards. `dcp.save(state,
# checkpoint_id=folder)` writes them; `dcp.load` *fills* such dictionaries, whatever the number of
# ranks, and `set_state_dict(module, optimizer, model_state_dict=..., optim_state_dict=...)` puts
# everything in place, also the optimizer's learning rate.

# %%
# Exercise 4.7: written by 4 ranks, read by 2
def save(module, optimizer, folder):
    """Writes parameters and optimizer state of all ranks."""
    ### BEGIN SOLUTION
    parameters, state = get_state_dict(module, optimizer)
    dcp.save({"model": parameters, "optimizer": state}, checkpoint_id=folder)
    ### END SOLUTION


# %%
# Exercise 4.7, second half
def load(module, optimizer, folder):
    """Reads them into this module and optimizer, on any number of ranks."""
    ### BEGIN SOLUTION
    parameters, moments = get_state_dict(module, optimizer)
    dcp.load({"model": parameters, "optimizer": moments}, checkpoint_id=folder)
    set_state_dict(module, optimizer, model_state_dict=parameters, optim_state_dict=moments)
    ### END SOLUTION


lab.check_checkpoint(save, load)

# %%
lab.compare_state_dicts(shard)

# %% [markdown]
# **Notice:** the full state dict is on rank 0 alone, and must fit there; other programs can read it.
# To go on training, on any number of ranks, the sharded one is enough.

# %% [markdown]
# ## FSDP1, for reading older code
#
# `fully_shard` replaces `FullyShardedDataParallel`, which wraps the module instead of changing it, and
# puts each unit's parameters into one flat parameter. Many codebases still use it. Here are its
# names, what each became, and what one step with each sent.

# %%
lab.fsdp1_names()

# %% [markdown]
# **Notice:** `SHARD_GRAD_OP` gathers once instead of twice; `NO_SHARD` gathers nothing, and reduces
# whole gradients: DDP. In bf16 half the bytes are gathered.
#
# Units were chosen by a policy: every module of a class (`transformer_auto_wrap_policy`), or every
# module from a size on (`size_based_auto_wrap_policy`).

# %%
lab.fsdp1_wrap_policies(PRESET)

# %% [markdown]
# **Notice:** by size, the units follow a number and not the structure of the model. The size at which
# blocks become units gives what the other policy gives; a smaller one splits them.

# %% [markdown]
# ## A billion parameters
#
# On a machine with several GPUs the next cell trains a transformer of a billion parameters with DDP
# and with FSDP, unattended, and lists the measured peaks next to the predicted ones. On one GPU it
# runs one of eight ranks alone: tensors and memory are real, but there is no other rank, so no loss
# and no speed. Without a GPU it predicts.

# %%
lab.billion_parameters()

# %% [markdown]
# ## I can …
#
# - [ ] say what a unit is, and count the collectives of a wrapping
# - [ ] say why the optimizer is made last
# - [ ] predict the largest model for a number of ranks and bytes
# - [ ] say what checkpointing saves and costs, and what offload moves
# - [ ] say which bytes each type of mixed precision halves
# - [ ] build a model that no rank ever holds, and load it on other ranks

# %% [markdown]
# ## How it usually goes wrong
#
# - **The optimizer made before sharding**: it updates parameters that the model no longer has.
# - **Only the root wrapped**: everything is gathered at once, as before.
# - **The root forgotten**: embeddings are whole, and each rank trains its own.
# - **One checkpoint around the model**: backward needs all activations at once.
# - **One seed on all ranks after `to_empty`**: shards that repeat one another.
# - **Only parameters saved**: training goes on without its moments.

# %% [markdown]
# ## What to read
#
# - Y. Zhao et al., [PyTorch FSDP](https://arxiv.org/abs/2304.11277), VLDB 2023, section 3.
#   *What does a unit's size decide, and what its order?*
# - [fully_shard](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html).
#   *What does `reshard_after_forward=8` mean on two nodes?*

# %% [markdown]
# ## What comes next
#
# Notebook **05 FSDP profiling**: where does the time of a step go, and which communication is
# exposed?
