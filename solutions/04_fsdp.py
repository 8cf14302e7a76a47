# %% [markdown]
# # 04 · FSDP
#
# **120 minutes** · any machine with 2 cores; on GPUs it shows speed too
#
# Fully sharded data parallelism (FSDP) is ZeRO-3 as torch ships it. You apply `fully_shard`, see
# that it does what your ZeRO-3 does, choose its units, and train what DDP has no memory for, under
# a limit that really ends a rank.
#
# *On a rented 8×A100 node: 5 minutes of compute, about $1.87.*

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
from torch.distributed.fsdp import fully_shard

import labs
import labs.fsdp as lab

labs.warm_up()
PRESET = lab.preset()  # or lab.preset("laptop", ranks=4): any size can be changed
PRESET

# %% [markdown]
# ## From ZeRO-3 to `fully_shard`
#
# `fully_shard(module)` makes a module a **unit**: its parameters become shards (`DTensor`), are
# gathered just before its forward and backward, freed after, and their gradients are
# reduce-scattered. Parameters that belong to a unit inside stay with that one; so begin inside, and
# end with the root.
#
# The parameters are **new objects** afterwards. `mesh=lab.mesh()` says which ranks share:
# here all.

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
# The check trains a GPT-2 of width 33 beside a twin, on 2 and 4 ranks, neither of which divides
# 33; then it counts bytes by category and collectives by kind.
#
# In fp32 with AdamW, DDP holds 16Ψ bytes and its buckets. How many MB will one of the ranks hold
# after backward under your strategy? The preset's GPT-2 has Ψ = 1.2 million.

# %%
# A guess, for exercise 4.1
### BEGIN SOLUTION
my_guess = 12
### END SOLUTION
labs.guess("MB per rank after backward, fully_shard", my_guess)

# %%
lab.beside_zero3(shard, PRESET)

# %% [markdown]
# **Notice:** the black ticks are ZeRO's formulas of notebook 03, stage 0 and stage 3: 16Ψ and 16Ψ/N
# bytes, 2Ψ and 3Ψ elements. `fully_shard` is your ZeRO-3, a little below 3Ψ because it does not
# gather the root twice. DDP's buffers are its buckets, a second copy of the gradients.

# %% [markdown]
# ## Which units?
#
# One unit for the whole model means two collectives, and the whole model gathered at once. One unit for
# each linear layer means little gathered, and many collectives, each with its fixed price.
#
# A step gathers the root once: it stays until backward has ended. Every other unit is gathered for forward
# and again for backward. Each unit is reduce-scattered once. How many collectives is that for the preset, with
# each block a unit?

# %%
# A guess, for exercise 4.2
### BEGIN SOLUTION
my_guess = 14
### END SOLUTION
labs.guess("collectives per step, each block", my_guess)

# %% [markdown]
# While one unit computes, the next is already being gathered, so two **neighbours** are whole at the
# same time, and the root.

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
swept = lab.sweep(wrappings, PRESET)
lab.show_sweep(swept, wrappings, cost)

# %% [markdown]
# **Notice:** from whole model to blocks, the gathered bytes (buffers) shrink to a third or less; from
# blocks to linear layers little is left to win, and the collectives multiply. On a CPU a collective
# costs little beside the computing; on GPUs the right column spreads far more.

# %% [markdown]
# ## The rule
#
# Every collective has a fixed price, so take the **fewest** that fit: the largest units whose gathered
# bytes have room beside shards and activations. Often that is one unit for each block.

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
# ## I can …
#
# - [ ] say what a unit is, and what happens to it in a step
# - [ ] count the collectives of a wrapping without running it
# - [ ] say why the optimizer is made last

# %% [markdown]
# ## How it usually goes wrong
#
# - **The optimizer made before sharding**: it updates parameters that the model no longer has.
# - **Only the root wrapped**: it shards, and gathers everything at once all the same.
# - **The root forgotten**: embeddings are whole everywhere, and each rank trains its own.

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
