# %% [markdown]
# # 03 · ZeRO stages
#
# | | |
# |:--|:--|
# | **Time** | 200 minutes, and 60 for the optional exercise |
# | **Needs** | any machine with 2 cores; no GPU |
#
# DDP keeps parameters, gradients and optimizer state on each of N ranks. The Zero Redundancy
# Optimizer (ZeRO) keeps each once: stage 1 divides the optimizer state among the ranks, stage 2 also
# the gradients, stage 3 also the parameters. You build all three; the loop stays as it is.

# %% [markdown]
# *On one GPU* four ranks share it, with gloo: what each holds and sends is a node's. NVLink's speed
# and the memory that NCCL itself takes do not show.

# %% [markdown]
# ## You will be able to
#
# - say what each rank holds and what travels under each stage, before you run it;
# - build ZeRO-1, -2 and -3 so that they train exactly as one process would;
# - say where a layer's parameters are while no rank has all of them;
# - clip gradients, save and load when no rank has everything;
# - choose a stage for a model and a machine.

# %% [markdown]
# ## The need
#
# In mixed precision, training with AdamW needs 16 bytes for each parameter: 2 for the parameter, 2
# for its gradient, 12 for its fp32 copy and two moments. DDP keeps all 16 on every rank. How many GB
# does a rank need for a model with 7 billion parameters, and how many if 8 ranks divide everything?

# %%
import torch
import torch.distributed as dist

import labs
import labs.zero_stages as lab

labs.warm_up()
PRESET = lab.preset()  # or lab.preset("laptop", ranks=4): any size can be changed
{stage: lab.state_bytes(7e9, ranks=8, stage=stage) / 1e9 for stage in (0, 1, 2, 3)}

# %% [markdown]
# **Notice:** DDP, stage 0, needs 112 GB on each rank, more than a GPU with 80 GB has, however many
# ranks there are. Each stage divides one part more. What is trained in this notebook is smaller:

# %%
PRESET

# %% [markdown]
# ## One shard for each rank
#
# A model has Ψ parameters, and N ranks train it. To give each rank 1/N of anything, lay it end to
# end in one **flat** tensor and cut it into N equal pieces, the **shards**. Collectives need equal
# pieces, but 1,230,848 parameters are not a multiple of 3. So zeros are put after the end:
# **padding**.
#
# The pieces are *views* of the padded tensor: when a collective fills it, every piece has its new
# numbers.

# %% [markdown]
# ### Exercise 3.1 · Cut a flat tensor into shards
#
# *Difficulty 2 of 5 · 10 minutes · target: equal pieces of one tensor, fewer than N zeros of
# padding*
#
# `flat` itself stays as it is, and the pieces have its dtype.

# %%
# Exercise 3.1: cut a flat tensor into one shard for each rank
def cut(flat, ranks):
    """A list of `ranks` equal pieces of `flat`, in order; zeros after its end if needed."""
    ### BEGIN SOLUTION
    length = (len(flat) + ranks - 1) // ranks
    padded = torch.cat([flat, flat.new_zeros(length * ranks - len(flat))])
    return [padded[rank * length : (rank + 1) * length] for rank in range(ranks)]
    ### END SOLUTION


# %%
lab.check_cut(cut)

# %%
lab.show_owners(cut, PRESET)

# %% [markdown]
# **Notice:** the picture has at least 3 ranks, also where your preset has 2. A shard may begin or end
# in the middle of a matrix. That does no harm, because AdamW treats every number by itself. With one
# flat tensor for all or with one for each layer, a rank owns 1/N. But layer by layer, less has to be
# gathered at a time.

# %% [markdown]
# *A question:* *[Muon](https://kellerjordan.github.io/posts/muon/)* orthogonalizes the momentum of each
# weight *matrix*, so it does not treat numbers one by one. It keeps one moment, 4 bytes for a number
# instead of AdamW's 8. What would a rank with half of a matrix need before it can step, and how could
# shards be laid out so that it needs nothing?

# %% [markdown]
# <details><summary>Answer</summary>
#
# The other half of the reduced gradient's momentum: a gather before the step, or each rank would
# orthogonalize a part, which is another update. If a rank owns complete matrices instead of equal
# pieces, it needs nothing; but then shards differ in length.
#
# </details>

# %% [markdown]
# ## ZeRO-1: divide the optimizer state
#
# In fp32, AdamW keeps two numbers for each parameter: 8Ψ bytes, as much as parameters (4Ψ) and
# gradients (4Ψ) together. With ZeRO-1, each rank updates only its own shard, so it keeps 8Ψ/N.
#
# A step then has three parts: **reduce** the gradients, so that each rank has the mean of its
# shard; *update* the shard; **gather** the updated parameters from all ranks.

# %% [markdown]
# In notebook 00, an all-reduce was a reduce-scatter and an all-gather. Each of the two sends
# Ψ·(N−1)/N elements from a rank. From here on, the factor (N−1)/N, which all collectives share, is
# left out: DDP sends 2Ψ per step. Guess: how
# many Ψ does a rank send per step under ZeRO-1?

# %%
# A guess, for exercise 3.2
### BEGIN SOLUTION
my_guess = 2
### END SOLUTION
labs.guess("3.2", "Ψ that ZeRO-1 sends per step", my_guess)

# %% [markdown]
# The lab has the pieces. A `FlatParameter` makes parameters views of one padded tensor, `flat.full`.
# `flat.shard` is this rank's piece of it: a view, too, and an `nn.Parameter`.
#
# | call | returns | blocks? |
# |:--|:--|:--|
# | `flat.flatten_gradients()` | a flat copy of the gradients, as long as `flat.full` | no |
# | `lab.reduce_scatter(tensor).wait()` | this rank's piece of the *sum* over ranks | at `.wait()` |
# | `lab.all_gather(full, shard)` | None; fills `full` with the shards of all ranks | yes |
#
# Two ranks and a layer with 9 parameters show what each one holds:

# %%
def shards_of_a_layer():
    flat = lab.FlatParameter(torch.nn.Linear(2, 3).parameters())
    return {"elements": flat.elements, "full": len(flat.full), "shard": len(flat.shard)}


labs.launch(shards_of_a_layer, ranks=2, quiet=True)

# %% [markdown]
# ### Exercise 3.2 · An optimizer that owns 1/N of the state
#
# *Difficulty 3 of 5 · 20 minutes · target: 8Ψ/N bytes of state, and no element sent without need*
#
# Your class wraps `inner`, an ordinary optimizer that you make: `optimizer_class` is, for example,
# `torch.optim.AdamW`, and `settings` are its arguments, such as `lr`. `lab.ShardedOptimizer` keeps
# `inner` and the list `self.flats`. Its `step()` calls `self.reduce()`, `inner.step()` and
# `self.gather()`.

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
# <details><summary>Hint</summary>
#
# The inner optimizer must not know that other shards exist: what are its parameters, then?
#
# In `reduce`, for each flat parameter: flatten the gradients, reduce-scatter them, and make of the
# sum the mean. The result is the gradient of the shard. In `gather`, for each flat parameter one
# all-gather. Leave the gradients of the model's own parameters alone: `zero_grad` clears them.
#
# </details>

# %% [markdown]
# A **strategy** takes a model and returns a module and an optimizer; the loop stays the plain
# loop. The check compares yours with the **reference**, one process that trains on the whole
# batch: with AdamW on 2, 3 and 4 ranks, where none of these numbers divides the model's 1597
# parameters, and with SGD on models of seven other structures. Then it counts the bytes that each
# rank holds and the elements that it sends.

# %%
def zero1(model, optimizer_class, **settings):
    flats = lab.flatten_layers(model)  # one for each layer, one for the rest
    return model, ZeRO1(flats, optimizer_class, **settings)


lab.check_zero1(zero1)

# %% [markdown]
# **Notice:** compare the Ψ in the verdict with your guess. The all-reduce of DDP is only split, and
# the update comes between its halves. `ZeroRedundancyOptimizer` under torch's DDP keeps the whole
# all-reduce and sends the parameters as well; the chart at the end shows both.

# %% [markdown]
# What a collective costs depends on the backend, too. gloo has no true reduce-scatter: it
# all-reduces everything and throws away what is not yours. `lab.reduce_scatter` does an
# **all-to-all** there instead: rank r gets piece r from everybody, and adds the pieces up. On NCCL,
# which has a true reduce-scatter, it calls that. The next cell counts the bytes that leave a rank with
# gloo, on the CPU of any machine.

# %%
lab.show_reduce_scatter(PRESET)

# %% [markdown]
# **Notice:** torch's reduce-scatter sends as much as the all-reduce inside it, ours half of that, as
# the formulas with (N−1)/N say. These bytes were counted in the rank's TCP connections. The checks
# count *logical* bytes: those that the collective's algorithm needs, whatever the backend does.

# %% [markdown]
# ## ZeRO-2: divide the gradients
#
# A rank updates one shard, so it needs the gradient of that shard only: 4Ψ/N bytes in fp32, or
# 3.5 GB for 7 billion parameters on 8 ranks. But autograd makes 28 GB. The remedy is the overlap of
# notebook 02: as soon as a layer's gradients are complete, they leave in a reduce-scatter and are
# *freed*, while backward goes on. If you reduce after backward, ZeRO-2 saves nothing at the peak.

# %% [markdown]
# `lab.ShardedModule` wraps the model and cuts it into `self.units`: a `FlatParameter` for each
# layer, and one for the **root**, which holds what is in no layer, and what layers share. It calls
# your methods:
#
# | method | called |
# |:--|:--|
# | `after_backward(unit)` | when the gradients of a unit are there, on all ranks in one order |
# | `backward_done()` | at the end of backward |
#
# `lab.reduce_scatter(tensor)` returns at once; only its `.wait()` blocks.

# %% [markdown]
# ### Exercise 3.3 · Gradients leave during backward
#
# *Difficulty 4 of 5 · 25 minutes · target: 4Ψ/N bytes of gradients; one layer's in flight while the
# next layer computes*
#
# Each reduce-scatter in flight holds a layer's gradients. So wait for the one before when you begin
# the next: one is in flight while a layer computes. Set the `.grad` of each of `unit.parameters` to None, or it stays in memory.
# `unit.add_gradient(mean)` adds to the gradient of `unit.shard`: gradients may accumulate over several
# passes.

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

# %% [markdown]
# <details><summary>Hint</summary>
#
# A pipeline of two: while layer k travels, layer k-1 computes. So when the gradients of layer k-1
# are there, it is time to wait for layer k.
#
# `after_backward`: finish what is in flight (the same code is needed at the end of backward, so it
# has a method). Flatten this unit's gradients, free the originals, begin the reduce-scatter, and
# remember the unit and what was returned. `backward_done`: if there is something in flight, wait for
# it, divide, add it to the shard's gradient, and forget it.
#
# </details>

# %%
class ZeRO2Optimizer(ZeRO1):
    def reduce(self):
        """Nothing: backward has done it."""


def zero2(model, optimizer_class, **settings):
    module = ZeRO2(model)
    return module, ZeRO2Optimizer(module.units, optimizer_class, **settings)


lab.check_zero2(zero2)

# %% [markdown]
# **Notice:** ZeRO-2 sends as much as ZeRO-1. What changes is the moment at which gradients leave, and
# so how many of them are in memory at once.

# %% [markdown]
# ## ZeRO-3: divide the parameters
#
# Now a rank keeps only its shards of the parameters, too: 2Ψ/N bytes instead of 2Ψ, in mixed
# precision 1.75 GB instead of 14 GB for 7 billion parameters on 8 ranks. Before a layer computes,
# its parameters are *gathered* from all ranks; after it, they are *freed*. Backward needs them
# once more: gathered again, freed again. Then the layer's gradients leave as in ZeRO-2.

# %% [markdown]
# ## Open the box: how a freed layer comes back
#
# Autograd saves a layer's weight in forward and reads it in backward. How can the weight be freed in
# between? A tensor is two things: a view (shape, strides, offset) and a **storage**, the memory that
# it looks at. `resize_(0)` frees the memory and keeps the storage, so every view still knows where
# to look. Guess what the last line prints before you run the cell.

# %%
full = torch.arange(6.0)
weight = full[:4].view(2, 2)  # a parameter, or what autograd saved: a view of the same storage
storage = full.untyped_storage()
storage.resize_(0)  # the memory is free; reading weight now would read where nothing is
storage.resize_(6 * full.element_size())  # new memory, with whatever it holds
full.copy_(torch.arange(6.0) * 10)  # an all-gather would fill it so
weight

# %% [markdown]
# The view shows the new numbers, although nobody has touched it. This is all that ZeRO-3 needs:
# `full` is refilled with the *same* numbers, and the parameters and what autograd saved are valid
# again. The next cell does that to a real layer, with these calls of a unit:
#
# | call | does | blocks? |
# |:--|:--|:--|
# | `unit.free()` | frees the memory of `unit.full`; `unit.shard` stays | no |
# | `unit.allocate()` | returns `unit.full` with memory, not yet filled | no |

# %%
lab.show_storage()

# %% [markdown]
# **Notice:** in the middle row, the views of the parameters and of autograd are still there, but they
# have no memory. If a layer computed now, without a gather, it would read address 0, and the process
# would die. `lab.ShardedModule` therefore checks before each layer that it is gathered.
#
# Frozen parameters are in no unit: every rank keeps them.

# %% [markdown]
# Now ZeRO-3. Think of what a rank sends in forward, in backward and in the
# step. How many Ψ per step are these together?

# %%
# A guess, for exercise 3.4
### BEGIN SOLUTION
my_guess = 3
### END SOLUTION
labs.guess("3.4", "Ψ that ZeRO-3 sends per step", my_guess)

# %% [markdown]
# ### Exercise 3.4 · A layer is gathered only while it is used
#
# *Difficulty 3 of 5 · 15 minutes · target: 16Ψ/N bytes and one layer, and no gather without need*
#
# `lab.ShardedModule` calls all four methods, for the layers and for the root. The root's forward is
# that of the whole model, so the layers' lie inside it.

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
# <details><summary>Hint</summary>
#
# Two moments at which a layer is needed, two after which it is not. What you wrote in exercise 3.3
# is still needed after the last one.
#
# Before forward and before backward: give the unit memory, and gather the shards into it. After
# forward: free it. After backward: free it, then do with the gradients what ZeRO-2 does.
#
# </details>

# %% [markdown]
# After a step nothing has to be gathered: the next forward will do it. So the optimizer is an
# ordinary one over the shards.
#
# The root's backward follows its forward at once. So the root may stay gathered between them, as
# FSDP2 leaves it by default. Then a step moves a little less than 3Ψ: the verdict says how much was
# measured.

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
# **Notice:** at most one layer has memory at a time, in addition to the root, which holds the
# embeddings and the head and is used from the first moment of the forward to the last. The red row
# shows when the rank waits: while a layer *is being* gathered, nothing computes. On a CPU, each
# rank has a slow link here, as in notebook 02: a gather takes real time and leaves the cores free.

# %% [markdown]
# ## Prefetch
#
# In the picture above, the rank waits for each gather: twice for each unit, so 14 times for the 7
# units of the laptop's model. While one layer computes, the next could be fetched. That costs one
# more layer of memory.
#
# | call | returns | blocks? |
# |:--|:--|:--|
# | `lab.all_gather(full, shard, async_op=True)` | a handle; keep it in `unit.handle` | no |
# | `unit.wait()` | None, when the gather in `unit.handle` is done | yes |
# | `self.next_unit(unit)` | the unit that comes next in this direction, or None | no |

# %% [markdown]
# ### Exercise 3.5 · Fetch the next layer while this one computes
#
# *Difficulty 4 of 5 · 20 minutes · target: while a layer computes, the gather of the next one
# is in flight, in forward and in backward*
#
# `unit.is_gathered` is True when a unit has memory, even if its gather is still in flight.
# `unit.free()` waits for that gather first. The root is the first unit in both directions.

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

# %% [markdown]
# <details><summary>Hint</summary>
#
# What is in flight while a layer computes? A gather that was begun before, and that nobody has
# waited for yet.
#
# `fetch` begins a gather and never waits; it does nothing for None and for a unit that has been
# fetched already. Before a unit computes: fetch it (only the first one is not there yet), fetch the
# next one, and wait for this one alone.
#
# </details>

# %%
def zero3_prefetch(model, optimizer_class, **settings):
    return zero3(model, optimizer_class, kind=Prefetching, **settings)


lab.check_prefetch(zero3_prefetch)

# %%
lab.show_gathered_layers(zero3_prefetch, PRESET)

# %% [markdown]
# **Notice:** while a layer computes, the next one is being gathered, in both directions, and one
# more layer is in memory. Compare the red rows and the time axes of both pictures: the rank waits
# less, and the step is shorter. Nothing can hide the first gathers of forward and of backward,
# because there is hardly anything to compute before them. Later waits are gathers that took longer
# than the layer before them computed.

# %% [markdown]
# ## The norm of a gradient that nobody has
#
# Gradient clipping scales all gradients so that the norm of them all together is at most a limit.
# But a rank has the gradients of its shards only: on 8 ranks, typically about a third of the norm.
# `torch.nn.utils.clip_grad_norm_` would clip too little, and each rank by another factor.
#
# Padding is zero and adds nothing. Under ZeRO-1, gradients are reduced in the step only:
# `reduce_once` reduces them earlier, and only once.

# %% [markdown]
# ### Exercise 3.6 · Clip by the norm over all ranks
#
# *Difficulty 3 of 5 · 15 minutes · target: one number travels, and every rank scales by the same
# factor*
#
# Do what `torch.nn.utils.clip_grad_norm_` does: scale the gradients of all groups in place, and
# return the norm that they had before, a tensor with one number. `dist.all_reduce(tensor)` sums a
# tensor over the ranks, in place, and blocks.

# %%
# Exercise 3.6: clip by the norm over all ranks
def clip_grad_norm(optimizer, max_norm):
    """Scales the shards' gradients in place so that their norm over all ranks is at most
    max_norm; returns the norm from before."""
    optimizer.reduce_once()
    groups = optimizer.param_groups
    gradients = [p.grad for group in groups for p in group["params"] if p.grad is not None]
    ### BEGIN SOLUTION
    square = sum((g.square().sum() for g in gradients), torch.zeros((), device=labs.device()))
    dist.all_reduce(square)
    norm = square.sqrt()
    for gradient in gradients:
        gradient *= (max_norm / norm).clamp(max=1.0)
    ### END SOLUTION
    return norm


# %%
lab.check_clip_grad_norm(clip_grad_norm)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Norms do not add up. What does, so that each rank can contribute one number?
#
# Sum the squares of this rank's gradients, all-reduce that sum, take the root: that is the norm.
# The factor is max_norm / norm, but at most 1. Multiply each gradient in place.
#
# </details>

# %% [markdown]
# ## Save and load, on another number of ranks
#
# Each rank writes its own shards, of the parameters and of both moments. What if 512 ranks have
# saved, and 8 are to load? For 70 billion parameters in fp32 with both moments, all shards together
# are 840 GB. A rank that joined them and cut them again would need all of that in its memory.
# How many GB does a rank need if it reads only its own part?

# %%
# A guess, for exercise 3.7
### BEGIN SOLUTION
my_guess = 105
### END SOLUTION
labs.guess("3.7", "GB that each of 8 ranks reads of 840 GB", my_guess)

# %% [markdown]
# ### Exercise 3.7 · The shard of a new rank, read from the old ones
#
# *Difficulty 3 of 5 · 20 minutes · target: each element is read once, where it is needed*
#
# `read(old, begin, end)` returns `shard[begin:end]` of the shard that rank `old` saved, as a tensor.
# The new shard is as long as one of `cut`, with zeros after the last element. Leave the old padding
# out: the check puts NaN there. Its beginning cannot be seen: parameters can be zero.

# %%
# Exercise 3.7: the shard of one of `after` ranks, from what `before` ranks have saved
def reshard(read, elements, before, after, rank):
    """elements: of all shards together, without padding. Returns a float32 tensor."""
    ### BEGIN SOLUTION
    k, old_k = -(-elements // after), -(-elements // before)
    shard = torch.zeros(k)
    first, last = rank * k, min((rank + 1) * k, elements)
    for old in range(before):
        begin, end = max(first, old * old_k), min(last, (old + 1) * old_k)
        if begin < end:
            shard[begin - first : end - first] = read(old, begin - old * old_k, end - old * old_k)
    return shard
    ### END SOLUTION


# %%
lab.check_reshard(reshard, zero1)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Number all elements from 0, without padding. Each old shard and each new shard is an interval of
# these numbers, and what must be read is where two intervals overlap.
#
# Compute how long old and new shards are, rounded up. This rank's interval ends where the elements
# end. For each old rank: the overlap begins at the later beginning and ends at the earlier end. If
# it is not empty, read it, counted from the beginning of the old shard, and put it into its place.
#
# </details>

# %%
lab.show_reads(reshard)

# %% [markdown]
# **Notice:** a rank reads its eighth of 840 GB once, and keeps all that it reads. torch's
# Distributed Checkpoint plans its reads in this way. Shards alone are not enough in a checkpoint:
# `elements` must be saved, too, because nothing in a shard says where the padding begins.

# %% [markdown]
# ## The chart
#
# Now all of them on the same model: DDP, your three, torch's `ZeroRedundancyOptimizer` and FSDP2,
# and DeepSpeed; each rank has one sequence of 16 tokens. First a guess: how many MB does a rank
# hold after backward under ZeRO-2, in fp32 with AdamW? On a laptop, Ψ is 1.22 million here, and
# there are 4 ranks. DDP keeps 16 bytes for each parameter, and a copy of the gradients in its
# buckets. The comparison takes about a minute.

# %%
# A guess, for exercise 3.8
### BEGIN SOLUTION
my_guess = 8.6
### END SOLUTION
labs.guess("3.8", "MB per rank after backward, ZeRO-2", my_guess)

# %% [markdown]
# ### Exercise 3.8 · Read the chart
#
# *Difficulty 2 of 5 · 15 minutes · target: for each bar, the parts that are divided: parameters,
# gradients, optimizer state*
#
# Write your answers down, on paper. The folded answer below the first chart is there to compare.

# %%
# Exercise 3.8: nothing to write, only to read
mine = {"ZeRO-1": zero1, "ZeRO-2": zero2, "ZeRO-3": zero3_prefetch}
comparison = lab.compare_stages(mine, PRESET)
comparison

# %%
lab.show_memory(comparison)

# %% [markdown]
# <details><summary>Answer</summary>
#
# - DDP: nothing is divided. Its buckets are a second copy of the gradients.
# - ZeRO-1 and `ZeroRedundancyOptimizer`: the optimizer state. The latter runs under DDP and has its
#   buckets, too.
# - ZeRO-2: optimizer state and gradients.
# - ZeRO-3 and FSDP2: all three. "No reshard" holds the same here, because the parameters that stay
#   after forward are freed in backward.
# - DeepSpeed 1 and 2: optimizer state and gradients, both; DeepSpeed 3: all three.
#
# </details>

# %% [markdown]
# **Notice:** after backward, each of your stages divides something that the one before kept on every
# rank: on 4 ranks, ZeRO-3 holds a fifth of what DDP holds. But a rank needs the memory of its highest
# moment:

# %%
lab.show_memory(comparison, "peak")

# %% [markdown]
# **Notice:** the sentence above the bars says when each peak is. In the step there are no activations,
# but all gradients and the optimizer's temporaries ("other"). In forward and backward, "activations"
# is all that these allocate and free again: what forward saved, which no stage divides, and gradients
# that are not reduced yet. ZeRO-3 also has gathered layers ("buffers"). Only torch's own strategies
# are predicted at the peak, so the others have no mark.

# %%
lab.show_traffic(comparison)

# %% [markdown]
# **Notice:** ZeRO-3 moves 3Ψ, DDP 2Ψ: 1.5 times as much. In no
# step does anybody gather optimizer state. Gathering in bf16 halves two of the three parts: FSDP2
# with bf16 gathers and fp32 reduction moves 8Ψ bytes, exactly as fp32 DDP does.

# %% [markdown]
# *When* a collective is in flight decides what can hide it: forward and backward compute for long,
# the step hardly at all.

# %%
lab.show_phases(comparison)

# %% [markdown]
# **Notice:** DDP sends everything in backward. ZeRO-1 and ZeRO-2 gather Ψ in the step, where nothing
# hides it; your ZeRO-1 sends its gradients there, too, because it reduces in `step()`. Your ZeRO-3
# sends nothing in the step, but Ψ in forward and 2Ψ in backward.

# %% [markdown]
# **DeepSpeed** differs from the formulas. It updates fp32 copies of its shards (4Ψ/N bytes more),
# even of fp32 parameters. Its stage 1 holds no more gradients than its stage 2. Both all-reduce them,
# so they send 3Ψ. Its stage 3 fetches ahead: when forward ends, backward needs the last layers first,
# so it keeps two of them. Of a laptop's six layers that is 0.32Ψ less to gather. The tied embedding,
# gathered for both of its modules, adds 0.05Ψ.

# %% [markdown]
# Where DeepSpeed is not installed, its bars are *recorded*: measured once on another machine with
# the same sizes.

# %% [markdown]
# ## A number to check
#
# A model with 70 billion parameters trains under ZeRO-2 on 8 ranks, at 12 bytes per parameter: bf16
# parameters (2) and gradients (2), fp32 moments (8). How many GB does each rank hold? Is it 210?
# Count what stays on every rank and what is divided, and guess.

# %%
# A guess, after exercise 3.8
### BEGIN SOLUTION
my_guess = 227.5
### END SOLUTION
labs.guess("3.8b", "GB per rank, 70B under ZeRO-2 on 8 ranks", my_guess)

# %%
lab.show_state_bytes(70e9, ranks=8)

# %% [markdown]
# **Notice:** where can 210 GB come from? It is 227.5 GB less the 17.5 GB of gradients that a rank
# still owns. It is also 840/4, as if ZeRO-2 on 8 ranks needed 4 times less than DDP. The ZeRO paper's
# "4 times" for ZeRO-1 and "8 times" for ZeRO-2 are limits for very many ranks, with 16 bytes per
# parameter.

# %% [markdown]
# ## When to use which
#
# Each stage saves and costs more. Stage 1 moves no more than DDP. Stage 2 must reduce in every
# backward pass, also while gradients accumulate. Stage 3 gathers for forward and again for backward:
# 3Ψ instead of 2Ψ. So take the lowest stage that fits.
#
# | call | returns |
# |:--|:--|
# | `lab.state_bytes(parameters, ranks, stage)` | bytes of parameters, gradients and states on a rank |
#
# It counts bf16 with an fp32 master copy. Activations come on top, and no stage divides them.

# %% [markdown]
# ### Exercise 3.9 · The lowest stage that fits
#
# *Difficulty 2 of 5 · 10 minutes · target: 148 cases, from DDP to "it does not fit"*
#
# Return one number, 0 for DDP, 1, 2 or 3, or None where no stage fits: model states and activations
# together must not be more than `capacity`. As much as the capacity fits.

# %%
# Exercise 3.9: the lowest stage that fits
def choose(parameters, ranks, capacity, activations):
    """One number, 0 (DDP), 1, 2 or 3, or None. capacity, activations: bytes per rank."""
    ### BEGIN SOLUTION
    for stage in (0, 1, 2, 3):
        if lab.state_bytes(parameters, ranks, stage) + activations <= capacity:
            return stage
    return None
    ### END SOLUTION


# %%
lab.check_choose(choose)

# %%
lab.show_choices(choose, activations=10e9)

# %% [markdown]
# **Notice:** an A100 that is sold with 80 GB has 80 GiB, less a little for the driver: 85.1 · 10⁹
# bytes. More ranks make lower stages possible, as for 13B, but only up to a point: parameters and
# gradients that every rank keeps in full do not shrink, however many ranks there are. So 70B stays
# at ZeRO-3.

# %% [markdown]
# ## Optional: ZeRO-3 from nothing
#
# You have used the lab's flat parameters, hooks and optimizer. Now build ZeRO-3 without them. The
# check refuses them, and has the same **invariants** as that of exercise 3.4: the losses of the
# reference, 16Ψ/N bytes and one layer, 3Ψ elements. What may stay:
#
# | call | returns |
# |:--|:--|
# | `lab.layer_groups(model)` | a list of (name, module, parameters), the root first |
# | `lab.tensors_in(output)` | the tensors in whatever a module returned |
# | `lab.all_gather`, `lab.reduce_scatter`, your `cut` | as before |

# %% [markdown]
# ### Exercise 3.10 · Your own units, hooks and order
#
# *Difficulty 5 of 5 · 60 minutes · target: the invariants of exercise 3.4, without lab classes*
#
# The names are a proposal. The last cell uses only `Unit`, `add_hooks` and `unit.shard`, an
# `nn.Parameter`, in whose `.grad` several backward passes add up. torch's hooks:
#
# | call | `fn` is called |
# |:--|:--|
# | `module.register_forward_pre_hook(fn)` | before forward: `fn(module, inputs)` |
# | `module.register_forward_hook(fn)` | after it: `fn(module, inputs, output)` |
# | `tensor.register_hook(fn)` | in backward, with the tensor's gradient |
# | `p.register_post_accumulate_grad_hook(fn)` | with p, when `p.grad` is complete |

# %%
# Exercise 3.10: parameters as views of one storage, of which this rank keeps a shard
class Unit:
    def __init__(self, module, parameters):
        self.module, self.parameters, self.ready = module, parameters, 0
        ### BEGIN SOLUTION
        pieces = cut(torch.cat([p.detach().flatten() for p in parameters]), dist.get_world_size())
        self.shard = torch.nn.Parameter(pieces[dist.get_rank()].clone())
        self.full = torch.cat(pieces)
        for p, view in zip(parameters, views(self, self.full)):
            p.data = view
        self.bytes = self.full.untyped_storage().nbytes()
        free(self)
        ### END SOLUTION

# %%
# Exercise 3.10, continued: memory that comes and goes
def views(unit, flat):  # of a flat tensor with padding, in the shapes of the parameters
    ### BEGIN SOLUTION
    flat = flat[: sum(p.numel() for p in unit.parameters)]
    pieces = flat.split([p.numel() for p in unit.parameters])
    return [piece.view(p.shape) for piece, p in zip(pieces, unit.parameters)]
    ### END SOLUTION


def gather(unit):  # unless it is gathered
    ### BEGIN SOLUTION
    if not unit.full.untyped_storage().nbytes():
        unit.full.untyped_storage().resize_(unit.bytes)
        lab.all_gather(unit.full, unit.shard)
    ### END SOLUTION


def free(unit):
    ### BEGIN SOLUTION
    unit.full.untyped_storage().resize_(0)
    ### END SOLUTION

# %%
# Exercise 3.10, continued: what happens when a gradient is complete
def count(unit):
    ### BEGIN SOLUTION
    unit.ready += 1
    if unit.ready < len(unit.parameters):
        return
    unit.ready = 0
    flat = torch.zeros(unit.full.shape, device=unit.shard.device)
    for p, view in zip(unit.parameters, views(unit, flat)):
        view.copy_(p.grad)
        p.grad = None
    free(unit)
    mean = lab.reduce_scatter(flat).wait() / dist.get_world_size()
    unit.shard.grad = mean if unit.shard.grad is None else unit.shard.grad + mean
    ### END SOLUTION

# %%
# Exercise 3.10, continued: which hook calls what
def add_hooks(unit):
    ### BEGIN SOLUTION
    def computed(module, inputs, output):
        free(unit)
        for tensor in lab.tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: gather(unit))

    unit.module.register_forward_pre_hook(lambda module, inputs: gather(unit))
    unit.module.register_forward_hook(computed)
    for p in unit.parameters:
        p.register_post_accumulate_grad_hook(lambda p: count(unit))
    ### END SOLUTION

# %%
def my_zero3(model, optimizer_class, **settings):
    units = [Unit(module, parameters) for _, module, parameters in lab.layer_groups(model)]
    for unit in units:
        add_hooks(unit)
    return model, optimizer_class([unit.shard for unit in units], **settings)


lab.check_from_scratch(my_zero3)

# %% [markdown]
# <details><summary>Hint</summary>
#
# The box is open already: `full` with a storage that comes and goes, `shard` with memory of its own.
#
# Build: flatten, cut, clone the own piece, make each parameter's `.data` a view, free. Forward: gather
# in the pre-hook, free in the hook. Backward reaches a unit when one of its outputs gets its gradient,
# so hook these tensors; several outputs must gather once. Count complete gradients: with the last one,
# flatten them, free everything, reduce-scatter, divide, and add that to what an earlier backward
# pass has left in the shard's gradient. Which parameters come first does not matter, as
# long as all ranks have the same order.
#
# </details>

# %% [markdown]
# ## A script of your own
#
# 02 ended with `ddp.py`. This file trains the same model with no more than `torch.distributed`, and
# divides the optimizer state: by whole parameters, each with an *owner*. So does torch's
# *[ZeroRedundancyOptimizer](https://docs.pytorch.org/docs/stable/distributed.optim.html)*, beside DDP.
# DeepSpeed and your ZeRO-1 cut a flat tensor instead, so that all shards are equal.

# %% [markdown]
# | Call | does |
# |:--|:--|
# | `dist.reduce(tensor, dst=rank)` | sums into one rank's tensor; the others' are undefined after it |
# | `dist.broadcast(tensor, src=rank)` | writes one rank's numbers into all ranks' tensors |

# %% [markdown]
# ### Exercise 3.11 · `zero1.py`
#
# *Difficulty 3 of 5 · 20 minutes · target: one owner for each parameter, shares of about one size;
# gradients and parameters as one process has them*
#
# The next cell writes the file. Fill in its two gaps. All ranks must find the same owners, without a
# word between them.

# %%
lab.write_script("zero1.py")

# %% [markdown]
# <details><summary>Hint</summary>
#
# First gap: go through the parameters from the largest to the smallest, and give each to the rank
# that has least so far. Every rank computes the same list, then picks what is its own.
#
# Second gap: three loops or lines: mean gradients to their owners, one step of the inner optimizer, new
# parameters to all. A parameter that requires a gradient is written through `parameter.detach()`.
#
# </details>

# %%
lab.check_zero1_script("zero1.py")

# %%
lab.torchrun("zero1.py", ranks=2)

# %% [markdown]
# ## I can …
#
# - divide an optimizer's state in plain torch
# - say for each stage what a rank holds, and how many Ψ travel
# - explain why ZeRO-2 must reduce during backward
# - say when a ZeRO-3 layer is gathered, what prefetching costs, and how freed memory comes back
# - clip gradients and load a checkpoint when no rank has everything

# %% [markdown]
# ## How it usually goes wrong
#
# - **States sharded, gradients all-reduced**: called ZeRO-2, moves 3Ψ, saves what ZeRO-1 saves.
# - **A hook that returns None** was meant to free the gradient: it stays.
# - **The remainder**: without padding, the last parameters are never updated.
# - **A sum for a mean**: AdamW almost hides it, clipping and SGD do not.
# - **Gathered in the first step only**: its parameters are used for ever.
# - **zero_grad for the shards only**: the parameters' own gradients add up.

# %% [markdown]
# ## What to read
#
# | read | by | a question |
# |:--|:--|:--|
# | [ZeRO](https://arxiv.org/abs/1910.02054) | S. Rajbhandari et al., 2020, sections 5 and 7 | Why does stage 2 cost no more communication than plain data parallelism? |
# | [PyTorch FSDP](https://arxiv.org/abs/2304.11277) | Y. Zhao et al., 2023, sections 3 and 4 | What do they flatten, and what does a larger unit cost and save? |
# | [DeepSpeed ZeRO](https://deepspeed.readthedocs.io/en/latest/zero3.html) | DeepSpeed | Which option says how much is fetched ahead, as your exercise 3.5 does? |

# %% [markdown]
# ## What comes next
#
# Notebook **04 FSDP**: what torch made of ZeRO-3, and a model that DDP has no memory for.
