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
# in one **flat** tensor and cut it into N equal pieces, the **shards**. Collectives need equal
# pieces, so zeros are put after the end where Ψ does not divide by N: **padding**.
#
# Cut *views*: pieces that share the memory of one tensor. Then gathering all pieces into that
# tensor puts everything back in place.

# %%
# Exercise 3.1: cut a flat tensor into one shard for each rank
def cut(flat, ranks):
    """A list of `ranks` equal pieces of `flat`, in order; zeros after its end if needed."""
    ### BEGIN SOLUTION
    length = (len(flat) + ranks - 1) // ranks
    padded = torch.cat([flat, flat.new_zeros(length * ranks - len(flat))])
    return [padded[rank * length : (rank + 1) * length] for rank in range(ranks)]
    ### END SOLUTION


lab.check_cut(cut)

# %%
lab.show_owners(cut, PRESET)

# %% [markdown]
# **Notice:** a shard begins and ends in the middle of a matrix. That does no harm, because AdamW
# treats every number by itself. One flat tensor for all or one for each layer: a rank owns 1/N
# either way. Layer by layer, less is in use at a time.

# %% [markdown]
# ## ZeRO-1: divide the optimizer state
#
# In fp32, AdamW keeps two numbers for each parameter: 8Ψ bytes, as much as parameters (4Ψ) and
# gradients (4Ψ) together. With ZeRO-1, each rank updates only its own shard, so it keeps 8Ψ/N.
#
# A step then has three parts: **reduce** the gradients, so that each rank has the mean of its
# shard; *update* the shard; **gather** the updated parameters from all ranks.

# %% [markdown]
# How many elements does a rank send per step, counted as in notebook 02, where an all-reduce of Ψ
# elements is a reduce-scatter (Ψ) and an all-gather (Ψ), so 2Ψ? Much material says that ZeRO-1
# costs more than DDP. Guess: how many Ψ does ZeRO-1 send?

# %%
# A guess, for exercise 3.2
### BEGIN SOLUTION
my_guess = 2
### END SOLUTION
labs.guess("3.2", "Ψ that ZeRO-1 sends per step", my_guess)

# %% [markdown]
# The lab has the pieces. `flat = lab.FlatParameter(parameters)` makes the parameters views of one
# padded tensor, `flat.full`; this rank's piece is the parameter `flat.shard`.
# `flat.flatten_gradients()` copies the gradients into such a tensor.
#
# `lab.reduce_scatter(tensor).wait()` is this rank's piece of the *sum* over ranks;
# `lab.all_gather(full, shard)` fills `full` with the shards of all ranks.
#
# `lab.ShardedOptimizer`, with the flats in `self.flats`, is an optimizer around `inner`, an
# ordinary one: it has its groups and state, and its `step()` calls `self.reduce()`, `inner.step()`
# and `self.gather()`.

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

    def gather(self):  # every flat.full gets the updated shards
        ### BEGIN SOLUTION
        for flat in self.flats:
            lab.all_gather(flat.full, flat.shard)
        ### END SOLUTION

# %% [markdown]
# A **strategy** takes a model and returns a module and an optimizer; the loop stays the plain
# loop. The check compares yours with the **reference**, one process that trains on the whole
# batch: AdamW with weight decay and a falling learning rate, on 2, 3 and 4 ranks, none of which
# divides 1597 parameters. Then it counts bytes and collectives.

# %%
def zero1(model, optimizer_class, **settings):
    flats = lab.flatten_layers(model)  # one for each layer, one for the rest
    return model, ZeRO1(flats, optimizer_class, **settings)


lab.check_zero1(zero1)

# %% [markdown]
# **Notice:** 2Ψ, as DDP: the all-reduce is only split, and the update comes between its
# halves. `ZeroRedundancyOptimizer` under torch's DDP keeps the all-reduce and sends the
# parameters as well: 3Ψ. The chart at the end shows both.

# %% [markdown]
# The parts also depend on the backend. gloo has no true reduce-scatter: it all-reduces everything
# and throws away what is not yours. `lab.reduce_scatter` does an **all-to-all** there instead:
# rank r gets piece r from everybody, and adds the pieces up. It moves what a reduce-scatter
# moves. On NCCL, which has a true one, it calls that.

# %%
lab.show_reduce_scatter(PRESET)

# %% [markdown]
# **Notice:** on gloo, torch's takes at least about as long as the all-reduce inside it. Ours sends
# half as much. How much time that saves depends on the machine: ranks on one machine share its
# memory, and the fewer they are, the less there is to save. Other programs that run meanwhile can
# change the order of the bars.

# %% [markdown]
# ## ZeRO-2: divide the gradients
#
# A rank updates one shard, so it needs the gradient of that shard only: 4Ψ/N. But autograd makes
# all 4Ψ. The remedy is the overlap of notebook 02: as soon as a layer's gradients are complete,
# they leave in a reduce-scatter and are *freed*, while backward goes on. If you reduce after
# backward, all of them are in memory at once, and ZeRO-2 saves nothing at the peak.

# %% [markdown]
# `lab.ShardedModule` wraps the model and cuts it into `self.units`, a `FlatParameter` for each
# layer and one for the rest, the **root**. It calls `self.after_backward(unit)` when the gradients
# of a unit are there, and `self.backward_done()` at the end, on all ranks in the same order.
#
# `lab.reduce_scatter(tensor)` returns at once; `.wait()` comes later. At most one may be in
# flight while the next layer computes: each holds a layer's gradients.
#
# Free the gradients of `unit.parameters`; `unit.add_gradient(mean)` adds to `unit.shard.grad`.

# %%
# Exercise 3.3: a layer's gradients leave during backward
class ZeRO2(lab.ShardedModule):
    in_flight = None  # (unit, its reduce-scatter), if there is one

    def after_backward(self, unit):
        ### BEGIN SOLUTION
        self.backward_done()  # the one before
        gradients = unit.flatten_gradients()
        for parameter in unit.parameters:
            parameter.grad = None
        self.in_flight = unit, lab.reduce_scatter(gradients)
        ### END SOLUTION

    def backward_done(self):
        ### BEGIN SOLUTION
        if self.in_flight:
            unit, pending = self.in_flight
            unit.add_gradient(pending.wait() / dist.get_world_size())
        self.in_flight = None
        ### END SOLUTION

# %%
class ZeRO2Optimizer(ZeRO1):
    def reduce(self):
        """Nothing: backward has done it."""


def zero2(model, optimizer_class, **settings):
    module = ZeRO2(model)
    return module, ZeRO2Optimizer(module.units, optimizer_class, **settings)


lab.check_zero2(zero2)

# %% [markdown]
# **Notice:** traffic is that of ZeRO-1. Only the moment changes at which gradients leave, and
# with it how many of them are there at once.

# %% [markdown]
# ## ZeRO-3: divide the parameters
#
# Now a rank keeps only its shards of the parameters, too. Before a layer computes, its parameters
# are *gathered* from all ranks; after it, they are *freed*. Backward needs them once more:
# gathered again, freed again. Then the layer's gradients leave as in ZeRO-2.
#
# `unit.free()` frees the memory of `unit.full` and keeps `unit.shard`; `unit.allocate()` returns
# `unit.full` with memory for an all-gather to fill. `lab.ShardedModule` calls all four methods.

# %% [markdown]
# So parameters travel in forward, again in backward, and gradients once. Some say that ZeRO-3 sends
# three times what DDP sends, others 1.5 times. How many Ψ per step do you think?

# %%
# A guess, for exercise 3.4
### BEGIN SOLUTION
my_guess = 3
### END SOLUTION
labs.guess("3.4", "Ψ that ZeRO-3 sends per step", my_guess)

# %%
# Exercise 3.4: a layer is gathered only while it is used
class ZeRO3(ZeRO2):
    def before_forward(self, unit):
        ### BEGIN SOLUTION
        lab.all_gather(unit.allocate(), unit.shard)
        ### END SOLUTION

    def after_forward(self, unit):
        ### BEGIN SOLUTION
        unit.free()
        ### END SOLUTION

    def before_backward(self, unit):
        ### BEGIN SOLUTION
        lab.all_gather(unit.allocate(), unit.shard)
        ### END SOLUTION

    def after_backward(self, unit):
        ### BEGIN SOLUTION
        unit.free()
        super().after_backward(unit)
        ### END SOLUTION

# %% [markdown]
# After a step nothing has to be gathered: the next forward will do it. So the optimizer is an
# ordinary one over the shards.

# %%
def zero3(model, optimizer_class, kind=ZeRO3, **settings):
    module = kind(model)
    for unit in module.units:
        unit.free()
    inner = optimizer_class([unit.shard for unit in module.units], **settings)
    return module, lab.ShardedOptimizer(inner, module.units)


lab.check_zero3(zero3)

# %%
lab.show_gathered_layers(zero3, PRESET)

# %% [markdown]
# **Notice:** at most one layer is gathered at a time, in addition to the root, which holds the
# embeddings and the head and is used from the first moment of the forward to the last.

# %% [markdown]
# ## Prefetch
#
# Between two layers everything now waits for a gather. While one layer computes, the next could be
# fetched: begin its all-gather with `async_op=True`, keep what it returns in `unit.handle`, and
# let `unit.wait()` wait for it when the layer's turn comes.
#
# `self.next_unit(unit)` is the unit that comes next, in forward as in backward, or None.
# `unit.is_gathered` says whether its memory is there, `unit.free()` waits for its gather first.
# Prefetching costs one more layer of memory.

# %%
# Exercise 3.5: fetch the next layer while this one computes
class Prefetching(ZeRO3):
    def fetch(self, unit):
        """Begins to gather a unit, unless it is None or has been begun."""
        ### BEGIN SOLUTION
        if unit is not None and not unit.is_gathered:
            unit.handle = lab.all_gather(unit.allocate(), unit.shard, async_op=True)
        ### END SOLUTION

    def before_forward(self, unit):
        ### BEGIN SOLUTION
        self.fetch(unit)
        self.fetch(self.next_unit(unit))
        unit.wait()
        ### END SOLUTION

    def before_backward(self, unit):
        self.before_forward(unit)

# %%
def zero3_prefetch(model, optimizer_class, **settings):
    return zero3(model, optimizer_class, kind=Prefetching, **settings)


lab.check_prefetch(zero3_prefetch)

# %%
lab.show_gathered_layers(zero3_prefetch, PRESET)

# %% [markdown]
# **Notice:** while a layer computes, the next one is being gathered, in both directions. On a CPU
# gathering takes the same cores as computing, so the step hardly becomes shorter, if at all.
# GPUs gather over links of their own and with few of their processors: there prefetching can hide
# most of it, which a CPU cannot show.

# %% [markdown]
# ## The norm of a gradient that nobody has
#
# Gradient clipping scales all gradients so that the norm of them all together is at most a limit.
# Under ZeRO-2 and -3 no rank has all of them: `torch.nn.utils.clip_grad_norm_` would see one shard,
# and every rank would scale by another factor.
#
# The norm is the root of a sum of squares, and sums are what ranks are good at. Padding is zero
# and adds nothing.

# %%
# Exercise 3.6: clip by the norm over all ranks
def clip_grad_norm(optimizer, max_norm):
    """Scales the shards' gradients in place so that their norm over all ranks is at most
    max_norm; returns the norm from before."""
    optimizer.reduce_once()
    groups = optimizer.param_groups
    gradients = [p.grad for group in groups for p in group["params"] if p.grad is not None]
    ### BEGIN SOLUTION
    square = sum((gradient.square().sum() for gradient in gradients), torch.tensor(0.0))
    dist.all_reduce(square)
    norm = square.sqrt()
    for gradient in gradients:
        gradient *= (max_norm / norm).clamp(max=1.0)
    ### END SOLUTION
    return norm


lab.check_clip_grad_norm(clip_grad_norm)

# %% [markdown]
# ## Save and load, on another number of ranks
#
# Each rank can write its own shards: of the parameters, and of both moments. Whoever loads them
# on as many ranks takes them as they are. On another number of ranks the shards must be put
# together and cut again; and the old padding must go, or it would lie in the middle.

# %%
# Exercise 3.7: the shards of another number of ranks
def reshard(shards, elements, ranks):
    """shards: those of all ranks that saved, in order, `elements` numbers and padding.
    Returns the shards of `ranks` ranks."""
    ### BEGIN SOLUTION
    return cut(torch.cat(shards)[:elements], ranks)
    ### END SOLUTION


lab.check_reshard(reshard, zero1)

# %% [markdown]
# ## The chart
#
# Now all of them on the same model: DDP, your three, torch's `ZeroRedundancyOptimizer` and FSDP2,
# and DeepSpeed, if it is installed. First a guess: what does a rank hold after backward under
# ZeRO-2, in MB, in fp32 with AdamW? On a laptop Ψ is 1.23 million, and there are 2 ranks. DDP
# keeps 16 bytes for each parameter, and a copy of the gradients in its buckets.

# %%
# A guess, for exercise 3.8
### BEGIN SOLUTION
my_guess = 12.3
### END SOLUTION
labs.guess("3.8", "MB per rank after backward, ZeRO-2", my_guess)

# %%
# Exercise 3.8: nothing to write, only to read
mine = {"ZeRO-1": zero1, "ZeRO-2": zero2, "ZeRO-3": zero3_prefetch}
comparison = lab.compare_stages(mine, PRESET)
comparison

# %%
lab.show_memory(comparison)

# %%
lab.show_memory(comparison, "peak")

# %% [markdown]
# **Notice:** after backward, each stage divides something that the stage before kept on every
# rank. The peak is at another moment: early in backward, when all activations and few gradients
# are there, or, under ZeRO-1, in the step, where it has all gradients. No stage of ZeRO divides
# activations, so ZeRO-2 gains little or nothing over ZeRO-1 here. In the model of the checks,
# which has hardly any activations, it does.

# %%
lab.show_traffic(comparison)

# %% [markdown]
# **Notice:** ZeRO-3 moves 1.5 times what DDP moves, not 3 times: 3Ψ against 2Ψ. Nobody ever
# gathers optimizer states. Gathering in bf16 halves two of the three parts: FSDP2 with bf16
# gathers and fp32 reduction moves 8Ψ bytes, exactly as fp32 DDP does.

# %% [markdown]
# Where **DeepSpeed** is installed, its memory is not that of the formulas: it updates an fp32 copy
# of its shards (4Ψ/N bytes more), even if the parameters are fp32, and its stages 1 and 2
# all-reduce gradients: 3Ψ. A formula counts what is needed; a library may add what it finds useful.

# %% [markdown]
# ## 210 or 227.5 GB?
#
# A model with 70 billion parameters under ZeRO-2 on 8 ranks, at 12 bytes per parameter (bf16
# parameters and gradients, fp32 moments): how much does each rank hold? Tables that are widely
# copied say 210 GB. Guess, then count: 2Ψ bytes stay on every rank, and 10Ψ are divided.

# %%
# A guess, after exercise 3.8
### BEGIN SOLUTION
my_guess = 227.5
### END SOLUTION
labs.guess("3.8b", "GB per rank, 70B under ZeRO-2 on 8 ranks", my_guess)

# %%
lab.show_state_bytes(70e9, ranks=8)

# %% [markdown]
# **Notice:** 210 GB is 227.5 without the gradients that a rank still owns, and also 840/4: as if
# 8 ranks saved 4 times. "4 times" for ZeRO-1 and "8 times" for ZeRO-2 are limits for very many
# ranks, with 16 bytes per parameter.

# %% [markdown]
# ## When to use which
#
# Each stage saves more and asks more. Stage 1 moves no more than DDP; stage 2 must reduce in
# every backward pass, also while gradients accumulate; stage 3 gathers twice and sends half as
# much again. So take the lowest stage that fits.
#
# `lab.state_bytes(parameters, ranks, stage)` are the bytes of parameters, gradients and states on a
# rank, in bf16 with an fp32 master copy. Activations come on top.

# %%
# Exercise 3.9: the lowest stage that fits
def choose(parameters, ranks, capacity, activations):
    """0 for DDP, 1, 2 or 3; None where nothing fits. capacity, activations: bytes per rank."""
    ### BEGIN SOLUTION
    for stage in (0, 1, 2, 3):
        if lab.state_bytes(parameters, ranks, stage) + activations <= capacity:
            return stage
    return None
    ### END SOLUTION


lab.check_choose(choose)

# %%
lab.show_choices(choose, activations=10e9)

# %% [markdown]
# **Notice:** more ranks make lower stages possible, up to a point: parameters and gradients that
# every rank keeps in full do not shrink, however many ranks there are.

# %% [markdown]
# ## I can …
#
# - [ ] say for each stage what a rank holds, and how many Ψ travel
# - [ ] explain why ZeRO-2 must reduce during backward
# - [ ] say when a ZeRO-3 layer is gathered, and what prefetching costs
# - [ ] clip gradients and load a checkpoint when no rank has everything

# %% [markdown]
# ## How it usually goes wrong
#
# - **States sharded, gradients all-reduced**: called ZeRO-2, moves 3Ψ, saves what ZeRO-1 saves.
# - **A hook that returns None** was meant to free the gradient: it stays.
# - **The remainder**: what does not divide by N is never updated.
# - **A sum for a mean**: AdamW almost hides it, and clipping does not.
# - **Gathered once**: parameters of the first step, for ever.
# - **A second zero_grad**: the shards forget, the parameters' own gradients pile up.

# %% [markdown]
# ## What to read
#
# - S. Rajbhandari et al., [ZeRO](https://arxiv.org/abs/1910.02054), 2020, sections 5 and 7.
#   *Why does stage 2 cost no more communication than plain data parallelism?*
# - Y. Zhao et al., [PyTorch FSDP](https://arxiv.org/abs/2304.11277), 2023, sections 3 and 4.
#   *What do they flatten, and what does a larger unit cost and save?*
# - [DeepSpeed ZeRO](https://deepspeed.readthedocs.io/en/latest/zero3.html). *Which of its buckets
#   is your unit?*

# %% [markdown]
# ## What comes next
#
# Notebook **04 FSDP**: what torch made of ZeRO-3, and a model that DDP has no memory for.
