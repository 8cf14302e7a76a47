# %% [markdown]
# # 03 · ZeRO stages
#
# **120 minutes** · any machine with 2 cores, no GPU
#
# DDP keeps parameters, gradients and optimizer state N times over. The Zero Redundancy Optimizer
# (ZeRO) keeps each once: stage 1 divides the optimizer state among the ranks, stage 2 the
# gradients too, stage 3 also the parameters. You build all three, and the training loop does not
# change by a line.
#
# *On a rented 8×A100 node: 3 minutes of compute, about $1.12.*

# %% [markdown]
# ## You will be able to
#
# - say what each rank holds and what travels under each stage, before you run it;
# - build ZeRO-1, -2 and -3 so that they train exactly as one process would;
# - clip gradients, save and load when no rank has everything;
# - choose a stage for a model and a machine.

# %% [markdown]
# ## What is trained here

# %%
import torch
import torch.distributed as dist

import labs
import labs.zero_stages as lab

labs.warm_up()
PRESET = lab.preset()  # or lab.preset("laptop", ranks=4): any size can be changed
PRESET

# %% [markdown]
# ## One shard for each rank
#
# A model has Ψ parameters, N ranks train it. To give each rank 1/N of anything, lay it end to end
# in one **flat** tensor and cut it into N equal pieces, the **shards**. Collectives want equal
# pieces, so zeros are put behind the end where Ψ does not divide by N: **padding**.
#
# Cut *views*: pieces that share the memory of one tensor. Then gathering all pieces into that tensor
# puts everything back in place.

# %%
# Exercise 3.1: cut a flat tensor into one shard for each rank
def cut(flat, ranks):
    """A list of `ranks` equal pieces of `flat`, in order; zeros behind its end if need be."""
    ### BEGIN SOLUTION
    length = (len(flat) + ranks - 1) // ranks
    padded = torch.cat([flat, flat.new_zeros(length * ranks - len(flat))])
    return [padded[rank * length : (rank + 1) * length] for rank in range(ranks)]
    ### END SOLUTION


lab.check_cut(cut)

# %%
lab.show_owners(cut, PRESET)

# %% [markdown]
# **Notice:** a shard knows nothing of layers: it begins and ends in the middle of a matrix. That is no
# harm, because AdamW treats every number by itself.

# %% [markdown]
# ## ZeRO-1: divide the optimizer state
#
# In fp32, AdamW keeps two numbers for each parameter: 8Ψ bytes, as much as parameters (4Ψ) and gradients
# (4Ψ) together. With ZeRO-1, each rank updates only its own shard, so it keeps 8Ψ/N.
#
# A step then has three parts: **reduce** the gradients, so that each rank has the mean of its
# shard; **update** the shard; **gather** the updated parameters from all ranks.

# %% [markdown]
# How many elements does a rank send per step, counted as in notebook 02, where an all-reduce of Ψ
# elements is a reduce-scatter (Ψ) and an all-gather (Ψ), so 2Ψ? Much material says that ZeRO-1
# costs more than DDP. Guess a number of Ψ for each stage.

# %%
# A guess, for exercises 3.2 to 3.4
### BEGIN SOLUTION
my_guess_1 = 2
my_guess_3 = 3
### END SOLUTION
labs.guess("Ψ that travel per step, ZeRO-1", my_guess_1)
labs.guess("Ψ that travel per step, ZeRO-3", my_guess_3)

# %% [markdown]
# The lab has the pieces. `flat = lab.Flat(parameters)` makes the parameters views of one padded
# tensor, `flat.whole`; this rank's piece of it is `flat.shard`, a parameter of its own.
# `flat.flatten_gradients()` copies the gradients into such a tensor.
#
# `lab.reduce_scatter(tensor).wait()` is this rank's piece of the **sum** over ranks, and
# `lab.all_gather(whole, shard)` fills `whole` with the shards of all ranks.
#
# `lab.ShardedOptimizer` is an optimizer around `inner`, an ordinary one: it has its groups and its
# state, and its `step()` calls `self.reduce()`, `inner.step()` and `self.gather()`.

# %%
# Exercise 3.2: an optimizer that owns 1/N of the state
class ZeRO1(lab.ShardedOptimizer):
    def __init__(self, flats, optimizer_class, **settings):
        ### BEGIN SOLUTION
        inner = optimizer_class([flat.shard for flat in flats], **settings)
        ### END SOLUTION
        super().__init__(inner, flats)

    def reduce(self):  # every flat.shard.grad becomes the mean over ranks
        ### BEGIN SOLUTION
        for flat in self.flats:
            total = lab.reduce_scatter(flat.flatten_gradients()).wait()
            flat.shard.grad = total / dist.get_world_size()
        ### END SOLUTION

    def gather(self):  # every flat.whole becomes new
        ### BEGIN SOLUTION
        for flat in self.flats:
            lab.all_gather(flat.whole, flat.shard)
        ### END SOLUTION

# %% [markdown]
# A **strategy** takes a model and returns a module and an optimizer; the loop stays the plain loop.
# The check trains yours beside a twin that has the whole batch in one process: AdamW with weight decay
# and a falling learning rate, on 2, 3 and 4 ranks, none of which divides 1597 parameters. Then it
# counts bytes and collectives.

# %%
def zero1(model, optimizer_class, **settings):
    parameters = [p for p in model.parameters() if p.requires_grad]
    return model, ZeRO1([lab.Flat(parameters)], optimizer_class, **settings)


lab.check_zero1(zero1)
