# %% [markdown]
# # 03 · ZeRO stages
#
# | In short | This notebook |
# |:--|:--|
# | **Time** | 185 minutes in two sittings (110 + 75), 85 more for optional parts |
# | **Needs** | any machine with 2 cores; no GPU |
#
# DDP replicates parameters, gradients and optimizer state on each of N ranks. The Zero Redundancy
# Optimizer (ZeRO) removes the replicas. Stage 1 shards the optimizer state, stage 2 also the
# gradients, stage 3 also the parameters. You implement all three; the training loop does not change.

# %% [markdown]
# <details><summary>On one GPU</summary>
#
# Four ranks share the GPU and communicate through gloo. What each rank stores and sends is the same
# as on a node with several GPUs. Two things cannot be seen: the speed of NVLink, and the memory that
# NCCL allocates for itself.
#
# </details>

# %% [markdown]
# ## You will be able to
#
# - predict what each rank stores and sends under ZeRO-1, -2 and -3, before you run it;
# - implement the three stages so that they train exactly as one process does;
# - explain where a layer's parameters are while they are sharded;
# - prefetch the next layer's parameters, and say what that costs.

# %% [markdown]
# ## Model states on each rank
#
# In mixed precision, training with AdamW needs 16 bytes per parameter: 2 for the parameter, 2 for its
# gradient, and 12 for its fp32 master copy and two moments. DDP keeps all 16 on every rank. How many
# GB does a rank need for a model with 7 billion parameters? How many if everything is sharded over
# 8 ranks?

# %%
import torch
import torch.distributed as dist

import labs
import labs.zero_stages as lab

labs.warm_up()
PRESET = lab.preset()  # or lab.preset("laptop", ranks=4): any size can be changed
{stage: lab.state_bytes(7e9, ranks=8, stage=stage) / 1e9 for stage in (0, 1, 2, 3)}

# %% [markdown]
# DDP (stage 0) needs 112 GB on each rank. That is more than a GPU with 80 GB has, and more ranks do
# not help. Each stage shards one part more. The model that you train in this notebook is smaller:

# %%
PRESET

# %% [markdown]
# ## Flat parameters, shards and padding
#
# A model has Ψ parameters, and N ranks train it. To give each rank 1/N of them, concatenate them into
# one **flat** tensor and split it into N equal **shards**. Collectives need shards of equal size, but
# 1,230,848 parameters are not a multiple of 3. So append zeros to the flat tensor: **padding**.
#
# The shards are *views* of the padded tensor. When a collective fills the tensor, every shard shows
# the new values.

# %% [markdown]
# ### Exercise 3.1 · Shard a flat tensor with padding
#
# *Difficulty 2 of 5 · 10 minutes · target: equal shards that are views of one tensor, fewer than N
# zeros of padding*
#
# Do not change `flat` itself. The shards have its dtype.

# %%
# Exercise 3.1: split a flat tensor into one shard per rank
def cut(flat, ranks):
    """A list of `ranks` equal shards of `flat`, in order, with zeros appended where needed."""
    ### BEGIN SOLUTION
    length = (len(flat) + ranks - 1) // ranks  # of a shard, rounded up
    padding = flat.new_zeros(length * ranks - len(flat))
    padded = torch.cat([flat, padding])
    shards = padded.view(ranks, length)  # row r is rank r's
    return list(shards)
    ### END SOLUTION


# %%
lab.check_cut(cut)

# %%
lab.show_owners(cut, PRESET)

# %% [markdown]
# **Notice:** a shard may begin or end in the middle of a matrix. That does no harm, because AdamW is
# elementwise: each parameter's update needs only its own gradient and moments.
#
# The picture has at least 3 ranks, also where your preset has 2. A rank owns 1/N with one flat tensor
# for the model, and also with one per layer. With one per layer, fewer parameters are gathered at a
# time.

# %% [markdown]
# *A question:* *[Muon](https://kellerjordan.github.io/posts/muon/)* orthogonalizes the momentum of each
# weight *matrix*, so it is not elementwise. It keeps one moment, 4 bytes per parameter instead of
# AdamW's 8. A rank owns half of a matrix. What does it need before it can step? How could the
# parameters be sharded so that it needs nothing?

# %% [markdown]
# <details><summary>Answer</summary>
#
# It needs the momentum of the other half, so an all-gather before the step. If each rank
# orthogonalized its half alone, the update would be a different one. If each rank owns complete
# matrices instead of equal shards, nothing has to be gathered. But then the shards differ in size.
#
# </details>

# %% [markdown]
# ## ZeRO-1: sharded optimizer state
#
# In fp32, AdamW keeps two moments per parameter: 8Ψ bytes, as much as parameters (4Ψ) and gradients
# (4Ψ) together. Under ZeRO-1, each rank updates only its own shard, so it keeps 8Ψ/N bytes.
#
# A step then has three parts. **Reduce** the gradients, so that each rank has the mean gradient of its
# shard. *Update* the shard. **Gather** the updated shards, so that every rank has all parameters.

# %% [markdown]
# In notebook 00, you split an all-reduce into a reduce-scatter and an all-gather. In each of the two, a
# rank sends Ψ·(N−1)/N elements. All collectives share the factor (N−1)/N, so from here on it is left
# out: DDP sends 2Ψ per step. Guess: how many Ψ does a rank send per step under ZeRO-1?

# %%
# A guess, for exercise 3.2
### BEGIN SOLUTION
my_guess = 2
### END SOLUTION
labs.guess("3.2", "Ψ that ZeRO-1 sends per step", my_guess)

# %% [markdown]
# `lab.FlatParameter` makes parameters views of one padded tensor, `flat.full`. `flat.shard` is this
# rank's shard. It is an `nn.Parameter` and also a view of `flat.full`, so an update of the shard
# changes the model's parameters.
#
# | call | returns | blocks? |
# |:--|:--|:--|
# | `flat.flatten_gradients()` | a copy of the gradients, as long as `flat.full` | no |
# | `lab.reduce_scatter(tensor).wait()` | this rank's shard of the *sum* over ranks | at `.wait()` |
# | `dist.all_gather_single(full, shard)` | None; fills `full` with all ranks' shards | yes |

# %% [markdown]
# Two ranks and a layer with 9 parameters show what each rank stores. The last entry is a
# reduce-scatter of ones:

# %%
def shards_of_a_layer():
    flat = lab.FlatParameter(torch.nn.Linear(2, 3).parameters())
    total = lab.reduce_scatter(torch.ones(len(flat.full), device=labs.device())).wait()
    return {"elements": flat.elements, "full": len(flat.full), "shard": len(flat.shard),
            "sum": total.tolist()}


labs.launch(shards_of_a_layer, ranks=2, quiet=True)

# %% [markdown]
# ### Exercise 3.2 · A sharded optimizer (ZeRO-1)
#
# *Difficulty 3 of 5 · 20 minutes · target: 8Ψ/N bytes of optimizer state, and no redundant
# communication*
#
# `inner` is an ordinary optimizer, for example `torch.optim.AdamW`. Its parameters are this rank's
# shards, so it allocates moments for them alone. `lab.ShardedOptimizer` keeps `inner` and the list
# `self.flats`. Its `step()` calls `self.reduce()`, `inner.step()` and `self.gather()`. Write the two
# methods. Pass `flat.shard.detach()` to a collective: collectives are not differentiable.

# %%
# Exercise 3.2: reduce-scatter before the update of the shard, all-gather after it
class ZeRO1(lab.ShardedOptimizer):
    def __init__(self, flats, optimizer_class, **settings):
        inner = optimizer_class([flat.shard for flat in flats], **settings)
        super().__init__(inner, flats)

    def reduce(self):  # every flat.shard.grad becomes the mean over ranks
        ### BEGIN SOLUTION
        for flat in self.flats:
            total = lab.reduce_scatter(flat.flatten_gradients()).wait()
            flat.shard.grad = total / dist.get_world_size()
        ### END SOLUTION

    def gather(self):  # every flat.full gets the updated shards of all ranks
        ### BEGIN SOLUTION
        for flat in self.flats:
            dist.all_gather_single(flat.full, flat.shard.detach())
        ### END SOLUTION

# %% [markdown]
# A **strategy** takes a model and returns a module and an optimizer; the training loop does not
# change. The check compares yours with the **reference**, one process that trains on the global
# batch. It uses AdamW on 2, 3 and 4 ranks, none of which divides the model's 1597 parameters, and SGD
# on models of seven other architectures. Then it measures the bytes that each rank stores and the
# elements that it sends.

# %%
def zero1(model, optimizer_class, **settings):
    flats = lab.flatten_layers(model)  # one per layer, and one for the other parameters
    return model, ZeRO1(flats, optimizer_class, **settings)


lab.check_zero1(zero1)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `inner.step()` reads `flat.shard.grad` and writes `flat.shard`. What is missing before it, and what
# is out of date after it?
#
# In `reduce`, for each flat parameter: flatten the gradients, reduce-scatter them, and divide the sum
# by the number of ranks. The result is the gradient of the shard. In `gather`: one all-gather for each
# flat parameter. Do not clear the gradients of the model's own parameters: `zero_grad` does that.
#
# </details>

# %% [markdown]
# Compare the Ψ in the verdict with your guess. ZeRO-1 splits DDP's all-reduce in two, and updates the
# shard between the halves.
#
# torch's `ZeroRedundancyOptimizer` under DDP keeps the complete all-reduce and also broadcasts the
# parameters. The comparison at the end shows both.

# %% [markdown]
# The cost of a collective also depends on the backend. gloo has no native reduce-scatter: it
# all-reduces the tensor and keeps one shard. So `lab.reduce_scatter` uses an **all-to-all** on gloo:
# rank r receives shard r from every rank, and sums these. On NCCL it calls
# `dist.reduce_scatter_single`. The next cell counts the bytes that a rank sends with gloo, always on
# the CPU.

# %%
lab.show_reduce_scatter(PRESET)

# %% [markdown]
# **Notice:** on gloo, torch's reduce-scatter sends as many bytes as an all-reduce;
# `lab.reduce_scatter` sends half of that, as the formula with (N−1)/N says.
#
# These bytes were counted in the rank's TCP connections. The checks count *logical* bytes instead:
# those that the collective's algorithm needs on any backend.

# %% [markdown]
# ## ZeRO-2: sharded gradients
#
# A rank updates one shard, so it needs the gradient of that shard only. In fp32 that is 4Ψ/N bytes:
# 3.5 GB for 7 billion parameters on 8 ranks. But autograd allocates 28 GB. The solution is the overlap
# of notebook 02: as soon as a layer's gradients are complete, reduce-scatter and *free* them, while
# backward continues. If you reduce after backward, ZeRO-2 saves nothing at the peak.

# %% [markdown]
# `lab.ShardedModule` wraps the model and splits its parameters into `self.units`: one `FlatParameter`
# per layer, and one for the **root**. The root unit has the parameters that are in no layer, and those
# that several layers share. The module calls your methods:
#
# | method | called |
# |:--|:--|
# | `after_backward(unit)` | when the unit's gradients are complete, in the same order on all ranks |
# | `backward_done()` | at the end of backward |

# %%
class PrintedCalls(lab.ShardedModule):
    def after_backward(self, unit):
        print(f"after_backward: unit {unit.name}")

    def backward_done(self):
        print("backward_done")


def backward_of_two_layers():
    module = PrintedCalls(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)))
    module(torch.ones(1, 2)).sum().backward()


_ = labs.launch(backward_of_two_layers, ranks=2)

# %% [markdown]
# ### Exercise 3.3 · Reduce-scatter gradients during backward
#
# *Difficulty 4 of 5 · 25 minutes · target: 4Ψ/N bytes of gradients; one layer's reduce-scatter in
# flight while the next layer computes*
#
# Every pending reduce-scatter keeps a layer's gradients alive, so allow only one: before you start the
# next, wait for the previous. Only `.wait()` blocks. Set the `.grad` of each of `unit.parameters` to
# None, or it stays allocated. `unit.add_gradient(mean)` adds to the gradient of `unit.shard`, because
# gradients may accumulate over several backward passes.

# %%
# Exercise 3.3: reduce-scatter and free a layer's gradients during backward
class ZeRO2(lab.ShardedModule):
    in_flight = None  # (unit, its pending reduce-scatter), if there is one

    def after_backward(self, unit):
        ### BEGIN SOLUTION
        self.backward_done()  # waits for the previous unit's
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
        """Does nothing: the gradients were reduced during backward."""


def zero2(model, optimizer_class, **settings):
    module = ZeRO2(model)
    return module, ZeRO2Optimizer(module.units, optimizer_class, **settings)


lab.check_zero2(zero2)

# %% [markdown]
# <details><summary>Hint</summary>
#
# This is a pipeline of depth two: while layer k's gradients are communicated, layer k-1 computes. When
# the gradients of layer k-1 are complete, wait for layer k's.
#
# `after_backward`: finish what is in flight. The end of backward needs the same code, so it has a
# method. Flatten this unit's gradients, free the originals, start the reduce-scatter, and store the
# unit with what it returned. `backward_done`: if something is in flight, wait for it, divide, add it
# to the shard's gradient, and clear `in_flight`.
#
# </details>

# %% [markdown]
# ZeRO-2 sends as much as ZeRO-1, as the verdict says. Only the time changes: gradients are reduced
# during backward, so fewer of them are allocated at once.

# %% [markdown]
# ## ZeRO-3: sharded parameters
#
# Now the parameters are sharded, too. In mixed precision, a rank keeps 2Ψ/N bytes instead of 2Ψ:
# 1.75 GB instead of 14 GB for 7 billion parameters on 8 ranks. Before a layer computes, its parameters
# are *gathered*: all-gathered from all ranks. After it, they are *freed*. Backward needs them again,
# so they are gathered and freed again. Then the layer's gradients are reduced as in ZeRO-2.

# %% [markdown]
# ## Tensor storage: free and reallocate
#
# Autograd saves a layer's weight in forward and reads it in backward. How can the weight be freed in
# between? A tensor has two parts: a view (shape, strides, offset) and a **storage**, the memory that
# the view refers to. `resize_(0)` frees the memory and keeps the storage object, so every view still
# refers to it. Guess what the last line prints before you run the cell.

# %%
full = torch.arange(6.0)
weight = full[:4].view(2, 2)  # like a parameter, or what autograd saved: a view of the same storage
storage = full.untyped_storage()
storage.resize_(0)  # the memory is freed; reading weight now would read an invalid address
storage.resize_(6 * full.element_size())  # new memory, with undefined contents
full.copy_(torch.arange(6.0) * 10)  # an all-gather would fill it in this way
weight

# %% [markdown]
# The view shows the new values, although no line has written to `weight`. ZeRO-3 needs nothing more:
# if `full` is filled again with the *same* values, the parameters and the tensors that autograd saved
# are valid again. The next cell does this to a real layer, with two methods of a unit:
#
# | call | does | blocks? |
# |:--|:--|:--|
# | `unit.free()` | frees the memory of `unit.full`; `unit.shard` stays | no |
# | `unit.allocate()` | returns `unit.full` with memory, not yet filled | no |

# %%
lab.show_storage()

# %% [markdown]
# **Notice:** in the middle row, the parameters and the tensor that autograd saved still exist, but
# their storage is empty.
#
# A layer that computed now would read address 0, and the process would crash. So `lab.ShardedModule`
# raises an error if a layer is about to compute and its parameters are not gathered.
#
# Frozen parameters are in no unit: every rank keeps them.

# %% [markdown]
# Now ZeRO-3. What does a rank send in forward, in backward and in the optimizer step? How many Ψ per
# step is that in total?

# %%
# A guess, for exercise 3.4
### BEGIN SOLUTION
my_guess = 3
### END SOLUTION
labs.guess("3.4", "Ψ that ZeRO-3 sends per step", my_guess)

# %% [markdown]
# ### Exercise 3.4 · All-gather and free each layer's parameters (ZeRO-3)
#
# *Difficulty 3 of 5 · 15 minutes · target: 16Ψ/N bytes plus one gathered layer, and no redundant
# all-gather*
#
# `lab.ShardedModule` calls all four methods, for the layers and for the root. The root's forward is
# the complete model's forward; the layers' calls are nested inside it.

# %%
# Exercise 3.4: a layer's parameters are gathered only while it computes
class ZeRO3(ZeRO2):
    def before_forward(self, unit):
        ### BEGIN SOLUTION
        full = unit.allocate()
        dist.all_gather_single(full, unit.shard.detach())
        ### END SOLUTION

    def after_forward(self, unit):
        ### BEGIN SOLUTION
        unit.free()
        ### END SOLUTION

    def before_backward(self, unit):
        self.before_forward(unit)  # backward needs the parameters again

    def after_backward(self, unit):
        ### BEGIN SOLUTION
        unit.free()
        super().after_backward(unit)
        ### END SOLUTION

# %% [markdown]
# After the optimizer step nothing has to be gathered: the next forward does that. So the optimizer is
# an ordinary one over the shards.
#
# The root's backward begins as soon as its forward has ended. So the root may stay gathered between
# them, which is FSDP2's default. Then a step sends a little less than 3Ψ; the verdict says how much
# was measured.

# %%
def zero3(model, optimizer_class, kind=ZeRO3, **settings):
    module = kind(model)
    for unit in module.units:
        unit.free()
    inner = optimizer_class([unit.shard for unit in module.units], **settings)
    return module, lab.ShardedOptimizer(inner, module.units)


lab.check_zero3(zero3)

# %% [markdown]
# <details><summary>Hint</summary>
#
# A layer's parameters are needed in two places, and are not needed after each of them. After the
# second one, what you wrote in exercise 3.3 is still needed.
#
# Before forward: give the unit memory, and all-gather the shards into it. After forward: free it.
# After backward: free it, then do with the gradients what ZeRO-2 does.
#
# </details>

# %%
lab.show_gathered_layers(zero3, PRESET)

# %% [markdown]
# **Notice:** at most one layer is gathered at a time, in addition to the root. The root has the
# embeddings and the head, so it is used from the beginning of forward to its end.
#
# The red row shows when the rank waits: while a layer's all-gather runs, nothing computes. On a CPU,
# each rank has a simulated slow link, as in notebook 02: an all-gather takes real time and leaves the
# cores idle.

# %% [markdown]
# ## Prefetching
#
# In the picture above, the rank waits for every all-gather. There are two per unit, so 14 for the 7
# units of the laptop's model. While one layer computes, the next layer's all-gather could be in
# flight. That costs the memory of one more layer.
#
# | call | returns | blocks? |
# |:--|:--|:--|
# | `dist.all_gather_single(…, async_op=True)` | a `Work` handle: store it in `unit.handle` | no |
# | `unit.wait()` | None, when the all-gather in `unit.handle` has completed | yes |
# | `self.next_unit(unit)` | the next unit in this direction, or None | no |

# %% [markdown]
# ### Exercise 3.5 · Prefetch the next layer's all-gather
#
# *Difficulty 4 of 5 · 20 minutes · target: while a layer computes, the next layer's all-gather is in
# flight, in forward and in backward*
#
# `unit.is_gathered` is True when a unit has memory, even if its all-gather is still in flight.
# `unit.free()` waits for that all-gather first. The root is the first unit in both directions.

# %%
# Exercise 3.5: prefetch the next layer's parameters while this layer computes
class Prefetching(ZeRO3):
    def fetch(self, unit):
        """Starts a unit's all-gather, unless the unit is None or it has been started."""
        ### BEGIN SOLUTION
        if unit is not None and not unit.is_gathered:
            full, shard = unit.allocate(), unit.shard.detach()
            unit.handle = dist.all_gather_single(full, shard, async_op=True)
        ### END SOLUTION

    def before_forward(self, unit):
        ### BEGIN SOLUTION
        self.fetch(unit)
        self.fetch(self.next_unit(unit))
        unit.wait()
        ### END SOLUTION

# %%
def zero3_prefetch(model, optimizer_class, **settings):
    return zero3(model, optimizer_class, kind=Prefetching, **settings)


lab.check_prefetch(zero3_prefetch)

# %% [markdown]
# <details><summary>Hint</summary>
#
# What is in flight while a layer computes? An all-gather that was started earlier, and that nothing
# has waited for yet.
#
# `fetch` starts an all-gather and never waits. It does nothing for None, and nothing for a unit that
# has been fetched. Before a unit computes: fetch it (only the first unit was not prefetched), fetch
# the next one, and wait for this one alone.
#
# </details>

# %%
lab.show_gathered_layers(zero3_prefetch, PRESET)

# %% [markdown]
# **Notice:** while a layer computes, the next one is being gathered, in both directions. One more
# layer is in memory. Compare the red rows and the time axes of both pictures: the rank waits less, and
# the step is shorter.
#
# The first all-gathers of forward and of backward stay exposed, because hardly anything computes
# before them. A later wait is an all-gather that took longer than the previous layer's computation.

# %% [markdown]
# ## Second sitting · 75 minutes
#
# | In short | This sitting |
# |:--|:--|
# | **Core** | 3.6, 3.8, 3.9, 3.11 |
# | **Optional** | 3.7, 3.10 |
# | **In a new kernel** | run the cell of the imports, and the code cells of exercises 3.1 to 3.5 |
#
# You will be able to:
#
# - clip gradients by the global norm when they are sharded;
# - compare memory and communication of DDP, ZeRO, FSDP2 and DeepSpeed;
# - choose a ZeRO stage for a model and a machine;
# - write ZeRO-1 as a script in plain PyTorch.

# %% [markdown]
# ## Gradient clipping with sharded gradients
#
# Gradient clipping scales all gradients so that their *global norm* is at most a limit. But a rank has
# only the gradients of its shards: on 8 ranks, their norm is typically about a third of the global
# norm. `torch.nn.utils.clip_grad_norm_` would clip too little, and by another factor on each rank.
#
# Padding is zero and adds nothing. ZeRO-1 reduces gradients in the step; `optimizer.reduce_once()`
# reduces them earlier, and only once.

# %% [markdown]
# ### Exercise 3.6 · Clip by the global norm
#
# *Difficulty 3 of 5 · 15 minutes · target: one number is communicated, and every rank scales by the
# same factor*
#
# Do what `torch.nn.utils.clip_grad_norm_` does: scale the gradients of all parameter groups in place,
# and return the norm before clipping, a tensor with one element. `dist.all_reduce(tensor)` sums a
# tensor over the ranks, in place, and blocks.

# %%
# Exercise 3.6: clip sharded gradients by their global norm
def clip_grad_norm(optimizer, max_norm):
    """Scales the shards' gradients in place so that their global norm is at most max_norm;
    returns the global norm before clipping."""
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
# Norms do not add up. Which quantity does, so that each rank can contribute one number?
#
# Sum the squares of this rank's gradients, all-reduce that sum, and take its square root: that is the
# global norm. The factor is max_norm / norm, but at most 1. Multiply each gradient in place.
#
# </details>

# %% [markdown]
# ## Optional: resharding a checkpoint
#
# Each rank saves its own shards of the parameters and of both moments. What if 512 ranks have saved a
# checkpoint, and 8 ranks load it? For 70 billion parameters in fp32 with both moments, all shards
# together are 840 GB. A rank that concatenated them and split them again would need all of that in its
# memory. How many GB does a rank need if it reads only its own part?

# %%
# A guess, for exercise 3.7
### BEGIN SOLUTION
my_guess = 105
### END SOLUTION
labs.guess("3.7", "GB that each of 8 ranks reads of 840 GB", my_guess)

# %% [markdown]
# ### Exercise 3.7 · Reshard a checkpoint for another number of ranks
#
# *Difficulty 3 of 5 · 20 minutes · target: each element is read once, by the rank that needs it*
#
# `read(old, begin, end)` returns `shard[begin:end]` of the shard that rank `old` saved. The new shard
# is as long as one of `cut`, with zeros after the last element. Do not read the old padding: the check
# puts NaN there. Zeros do not show where it starts: parameters may be zero.

# %%
# Exercise 3.7: the shard of one of `after` ranks, from the shards that `before` ranks saved
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
# these numbers. Read where an old interval and the new one overlap.
#
# Compute the length of an old and of a new shard, rounded up. The new interval ends at `elements` at
# the latest. For each old rank: the overlap starts at the larger start and ends at the smaller end. If
# it is not empty, read it, with positions relative to the start of the old shard, and write it to its
# position in the new shard.
#
# </details>

# %%
lab.show_reads(reshard)

# %% [markdown]
# **Notice:** a rank reads its eighth of 840 GB once, and keeps all that it reads.
#
# torch's Distributed Checkpoint plans its reads in this way. The shards alone are not a complete
# checkpoint: `elements` must be saved, too, because nothing in a shard says where the padding begins.

# %% [markdown]
# ## DDP, ZeRO, FSDP2 and DeepSpeed compared
#
# The next cells train the same model with DDP, your three stages, torch's `ZeroRedundancyOptimizer`
# and FSDP2, and DeepSpeed. Each rank has one sequence of 16 tokens.
#
# A guess first: how many MB are allocated on a rank after backward under ZeRO-2, in fp32 with AdamW?
# On a laptop, Ψ is 1.22 million here, and there are 4 ranks. DDP keeps 16 bytes per parameter, and a
# copy of the gradients in its buckets.

# %%
# A guess, for exercise 3.8
### BEGIN SOLUTION
my_guess = 8.6
### END SOLUTION
labs.guess("3.8", "MB per rank after backward, ZeRO-2", my_guess)

# %% [markdown]
# ### Exercise 3.8 · What each strategy shards
#
# *Difficulty 2 of 5 · 15 minutes · target: 16 cases, on 2 to 8 ranks*
#
# Libraries do not always shard what a stage's name says. So judge them by their bytes: which stage is a
# strategy if a rank stores `stored` after backward, and `replicated` under DDP? Padding can add a few
# percent to any part.

# %%
# Exercise 3.8: name the stage by what a rank stores
def stage_by_bytes(stored, replicated):
    """Both: bytes of "parameters", "gradients" and "optimizer state". Returns 0 (DDP), 1, 2 or 3."""
    ### BEGIN SOLUTION
    stage = 0
    for part in ("optimizer state", "gradients", "parameters"):
        if stored[part] > 0.75 * replicated[part]:
            break
        stage += 1
    return stage
    ### END SOLUTION

# %%
lab.check_stage_by_bytes(stage_by_bytes)

# %% [markdown]
# The next cell trains with all strategies. It takes about a minute. Which stage do you expect for
# `ZeroRedundancyOptimizer`, for FSDP2 and for DeepSpeed 1?

# %%
mine = {"ZeRO-1": zero1, "ZeRO-2": zero2, "ZeRO-3": zero3_prefetch}
comparison = lab.compare_stages(mine, PRESET)
comparison

# %%
lab.show_memory(comparison)

# %%
lab.show_stages_by_bytes(stage_by_bytes, comparison)

# %% [markdown]
# <details><summary>What each strategy shards</summary>
#
# - DDP: nothing is sharded. Its buckets are a second copy of the gradients.
# - ZeRO-1 and `ZeroRedundancyOptimizer`: the optimizer state. The latter runs under DDP, so it has
#   DDP's buckets, too.
# - ZeRO-2: optimizer state and gradients.
# - ZeRO-3 and FSDP2: all three. "No reshard" needs the same memory here: its parameters stay gathered
#   after forward, but they are freed during backward.
# - DeepSpeed 1 and 2: optimizer state and gradients, both of them. DeepSpeed 3: all three.
#
# </details>

# %% [markdown]
# **Notice:** after backward, each of your stages shards something that the previous one replicates. On
# 4 ranks, ZeRO-3 needs a fifth of DDP's memory.
#
# But a rank needs memory for its peak:

# %%
lab.show_memory(comparison, "peak")

# %% [markdown]
# **Notice:** the sentence above the bars says in which phase each strategy has its peak.
#
# In the optimizer step there are no activations, but all gradients and the optimizer's temporary
# tensors ("other"). In forward and backward, "activations" is all that these allocate and free again:
# what autograd saved, which no stage shards, and gradients that are not reduced yet. ZeRO-3 also has
# gathered layers ("buffers"). Only torch's own strategies have a predicted peak, a tick.

# %%
lab.show_traffic(comparison)

# %% [markdown]
# **Notice:** ZeRO-3 sends 3Ψ and DDP 2Ψ, so ZeRO-3 sends 1.5 times as much. Optimizer state is never
# gathered.
#
# All-gathers in bf16 halve two of the three parts: FSDP2 with bf16 all-gathers and an fp32
# reduce-scatter sends 8Ψ bytes, exactly as many as DDP in fp32.

# %% [markdown]
# Communication can be overlapped only with computation. Forward and backward compute for a long time,
# the optimizer step hardly at all. The next table shows in which phase each strategy communicates:

# %%
lab.show_phases(comparison)

# %% [markdown]
# **Notice:** DDP sends everything in backward. ZeRO-1 and ZeRO-2 gather Ψ in the step, where nothing
# overlaps it.
#
# Your ZeRO-1 also reduces its gradients in the step, because it does so in `step()`. Your ZeRO-3 sends
# nothing in the step, Ψ in forward and 2Ψ in backward.

# %% [markdown]
# <details><summary>Where DeepSpeed differs from the formulas</summary>
#
# - **DeepSpeed** updates fp32 copies of its shards, even of fp32 parameters: 4Ψ/N bytes more.
# - Its stage 1 stores no more gradients than its stage 2. Both all-reduce gradients, so they send 3Ψ.
# - Its stage 3 prefetches, and keeps two of the last layers when forward ends, because backward needs
#   these first. Of a laptop's six layers that is 0.32Ψ less to gather.
# - The tied embedding is gathered for both of its modules, which adds 0.05Ψ.
# - If DeepSpeed is not installed, its bars are *recorded*: measured once on another machine with the
#   same sizes.
#
# </details>

# %% [markdown]
# ## ZeRO-2 for 70 billion parameters
#
# A model with 70 billion parameters trains under ZeRO-2 on 8 ranks, with 12 bytes per parameter: bf16
# parameters (2), bf16 gradients (2) and fp32 moments (8). How many GB of model states does each rank
# store? Is it 210? Count what is replicated and what is sharded, and guess.

# %%
# A guess, after exercise 3.8
### BEGIN SOLUTION
my_guess = 227.5
### END SOLUTION
labs.guess("3.8b", "GB per rank, 70B under ZeRO-2 on 8 ranks", my_guess)

# %%
lab.show_state_bytes(70e9, ranks=8)

# %% [markdown]
# **Notice:** each rank stores 227.5 GB. Two mistakes lead to 210 GB.
#
# The first leaves out the 17.5 GB of gradients that a rank still owns. The second divides 840 GB by 4,
# as if ZeRO-2 on 8 ranks needed a quarter of DDP's memory. The
# *[ZeRO paper](https://arxiv.org/abs/1910.02054)* says "4 times" for ZeRO-1 and "8 times" for ZeRO-2:
# these are limits for very many ranks, at 16 bytes per parameter.

# %% [markdown]
# ## Choosing a ZeRO stage
#
# Each stage saves more memory and costs more. Stage 1 sends no more than DDP. Stage 2 must reduce in
# every backward pass, also while gradients accumulate. Stage 3 gathers for forward and again for
# backward: 3Ψ instead of 2Ψ. So use the lowest stage that fits.
#
# | call | returns |
# |:--|:--|
# | `lab.state_bytes(parameters, ranks, stage)` | bytes of model states on a rank |
#
# It assumes bf16 with an fp32 master copy. Activations are not included, and no stage shards them.

# %% [markdown]
# ### Exercise 3.9 · The lowest stage that fits
#
# *Difficulty 2 of 5 · 10 minutes · target: 148 cases, from DDP to "it does not fit"*
#
# Return 0 for DDP, 1, 2 or 3 for a ZeRO stage, or None if no stage fits. A stage fits if model states
# and activations together take no more than `capacity`. Exactly the capacity still fits.

# %%
# Exercise 3.9: the lowest stage that fits
def lowest_stage(parameters, ranks, capacity, activations):
    """0 (DDP), 1, 2 or 3, or None. capacity, activations: bytes per rank."""
    ### BEGIN SOLUTION
    for stage in (0, 1, 2, 3):
        needed = lab.state_bytes(parameters, ranks, stage) + activations
        if needed <= capacity:
            return stage
    return None
    ### END SOLUTION


# %%
lab.check_lowest_stage(lowest_stage)

# %%
lab.show_choices(lowest_stage, activations=10e9)

# %% [markdown]
# **Notice:** with more ranks a lower stage fits, for example for 13B. But parameters and gradients
# that every rank replicates do not shrink, however many ranks there are. So 70B stays at ZeRO-3.
#
# An A100 that is sold with 80 GB has 80 GiB, less a little for the driver: 85.1 · 10⁹ bytes.

# %% [markdown]
# ## Optional: ZeRO-3 from PyTorch hooks
#
# You have used the lab's flat parameters, hooks and optimizer. Now implement ZeRO-3 without them. The
# check rejects them, and tests the same **invariants** as that of exercise 3.4: the losses of the
# reference, 16Ψ/N bytes plus one layer, 3Ψ elements. You may still use `lab.reduce_scatter`, your
# `cut`, and these two:
#
# | call | returns |
# |:--|:--|
# | `lab.layer_groups(model)` | a list of (name, module, parameters), the root first |
# | `lab.tensors_in(output)` | the tensors in whatever a module returned |

# %%
tiny = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))  # nothing is in its root
print([(name, len(parameters)) for name, _, parameters in lab.layer_groups(tiny)])
print(lab.tensors_in({"loss": torch.ones(()), "steps": 3}))

# %% [markdown]
# ### Exercise 3.10 · ZeRO-3 from PyTorch hooks
#
# *Difficulty 5 of 5 · 60 minutes · target: the invariants of exercise 3.4, without the lab's classes*
#
# The names are a suggestion. The check's cell uses only `FlatUnit`, `add_hooks` and `unit.shard`. This
# is an `nn.Parameter` in whose `.grad` several backward passes accumulate. torch's hooks:
#
# | call | `fn` is called |
# |:--|:--|
# | `module.register_forward_pre_hook(fn)` | before forward: `fn(module, inputs)` |
# | `module.register_forward_hook(fn)` | after it: `fn(module, inputs, output)` |
# | `tensor.register_hook(fn)` | in backward, with the tensor's gradient |
# | `p.register_post_accumulate_grad_hook(fn)` | with p, when `p.grad` is complete |

# %%
# Exercise 3.10: parameters as views of one storage, and this rank's shard of it
class FlatUnit:
    def __init__(self, module, parameters):
        self.module, self.parameters, self.ready = module, parameters, 0
        ### BEGIN SOLUTION
        pieces = cut(torch.cat([p.detach().flatten() for p in parameters]), dist.get_world_size())
        self.shard = torch.nn.Parameter(pieces[dist.get_rank()].clone())
        self.full = torch.cat(pieces)
        for p, view in zip(parameters, parameter_views(self, self.full)):
            p.data = view
        self.bytes = self.full.untyped_storage().nbytes()
        free_unit(self)
        ### END SOLUTION


def free_unit(flat_unit):
    flat_unit.full.untyped_storage().resize_(0)

# %%
# Exercise 3.10, continued: views of the parameters, and the all-gather
def parameter_views(unit, flat):  # of a padded flat tensor, in the shapes of the parameters
    ### BEGIN SOLUTION
    flat = flat[: sum(p.numel() for p in unit.parameters)]
    pieces = flat.split([p.numel() for p in unit.parameters])
    return [piece.view(p.shape) for piece, p in zip(pieces, unit.parameters)]
    ### END SOLUTION


def unshard_unit(unit):  # does nothing if the unit is gathered
    ### BEGIN SOLUTION
    if not unit.full.untyped_storage().nbytes():
        unit.full.untyped_storage().resize_(unit.bytes)
        dist.all_gather_single(unit.full, unit.shard.detach())
    ### END SOLUTION

# %%
# Exercise 3.10, continued: when one of the unit's gradients is complete
def gradient_ready(unit):
    ### BEGIN SOLUTION
    unit.ready += 1
    if unit.ready < len(unit.parameters):
        return
    unit.ready = 0
    flat = torch.zeros(unit.full.shape, device=unit.shard.device)
    for p, view in zip(unit.parameters, parameter_views(unit, flat)):
        view.copy_(p.grad)
        p.grad = None
    free_unit(unit)
    mean = lab.reduce_scatter(flat).wait() / dist.get_world_size()
    unit.shard.grad = mean if unit.shard.grad is None else unit.shard.grad + mean
    ### END SOLUTION

# %%
# Exercise 3.10, continued: which hook calls which function
def add_hooks(unit):
    ### BEGIN SOLUTION
    def after_forward(module, inputs, output):
        free_unit(unit)
        for tensor in lab.tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: unshard_unit(unit))

    unit.module.register_forward_pre_hook(lambda module, inputs: unshard_unit(unit))
    unit.module.register_forward_hook(after_forward)
    for p in unit.parameters:
        p.register_post_accumulate_grad_hook(lambda p: gradient_ready(unit))
    ### END SOLUTION

# %%
def my_zero3(model, optimizer_class, **settings):
    units = [FlatUnit(module, parameters) for _, module, parameters in lab.layer_groups(model)]
    for unit in units:
        add_hooks(unit)
    return model, optimizer_class([unit.shard for unit in units], **settings)


lab.check_from_scratch(my_zero3)

# %% [markdown]
# <details><summary>Hint</summary>
#
# You have seen the mechanism: `full` has a storage that is freed and reallocated, `shard` has memory of
# its own.
#
# Build: flatten, cut, clone this rank's shard, make each parameter's `.data` a view, free. Forward:
# gather in the pre-hook, free in the hook. Backward reaches a unit when one of its outputs gets its
# gradient, so hook these tensors; several outputs must gather only once. Count complete gradients:
# after the last one, flatten them, free everything, reduce-scatter, divide, and add the mean to what
# an earlier backward pass left in the shard's gradient. The order of the units is free, but must be
# the same on all ranks.
#
# </details>

# %% [markdown]
# ## ZeRO-1 in plain PyTorch
#
# Notebook 02 ended with `ddp.py`. This script trains the same model with `torch.distributed` alone, and
# shards the optimizer state by complete parameters: each has an *owner* rank. torch's
# *[ZeroRedundancyOptimizer](https://docs.pytorch.org/docs/stable/distributed.optim.html)* partitions
# it in the same way. DeepSpeed and your ZeRO-1 split a flat tensor instead, so that all shards have
# the same size.

# %% [markdown]
# | call | does |
# |:--|:--|
# | `dist.reduce(tensor, dst=rank)` | sums into one rank's tensor; on the others it is undefined afterwards |
# | `dist.broadcast(tensor, src=rank)` | copies one rank's tensor to all ranks |

# %% [markdown]
# ### Exercise 3.11 · `zero1.py`
#
# *Difficulty 3 of 5 · 20 minutes · target: one owner per parameter, balanced numbers of elements per
# rank; gradients and parameters as in one process*
#
# The next cell writes the file. Fill in its two gaps. All ranks must compute the same owners, without
# communication.

# %%
lab.write_script("zero1.py")

# %%
lab.check_zero1_script("zero1.py")

# %% [markdown]
# <details><summary>Hint</summary>
#
# First gap: go through the parameters from the largest to the smallest, and give each to the rank that
# has the fewest elements so far. Every rank computes the same list, then selects its own parameters.
#
# Second gap, three parts: reduce the mean gradients to their owners, step the inner optimizer, and
# broadcast the new parameters. A collective writes into a parameter through `parameter.detach()`.
#
# </details>

# %%
lab.torchrun("zero1.py", ranks=2)

# %% [markdown]
# ## I can …
#
# - shard an optimizer's state in plain PyTorch
# - say for each stage what a rank stores, and how many Ψ it sends
# - explain why ZeRO-2 must reduce during backward
# - say when a ZeRO-3 layer is gathered, what prefetching costs, and how freed memory is reallocated
# - clip sharded gradients by their global norm
# - choose the lowest stage that fits

# %% [markdown]
# ## How it usually goes wrong
#
# - **Optimizer state sharded, gradients all-reduced**: called ZeRO-2, sends 3Ψ, saves what ZeRO-1 saves.
# - **A hook that returns None** does not free the gradient.
# - **No padding**: the last parameters are never updated.
# - **A sum instead of a mean**: AdamW almost hides it, clipping and SGD do not.
# - **All-gather in the first step only**: later steps use outdated parameters.
# - **zero_grad for the shards only**: the parameters' own gradients accumulate.

# %% [markdown]
# ## What to read
#
# | read | by | a question |
# |:--|:--|:--|
# | [ZeRO](https://arxiv.org/abs/1910.02054) | S. Rajbhandari et al., 2020, sections 5 and 7 | Why does stage 2 cost no more communication than plain data parallelism? |
# | [PyTorch FSDP](https://arxiv.org/abs/2304.11277) | Y. Zhao et al., 2023, sections 3 and 4 | What do they flatten, and what does a larger unit cost and save? |
# | [DeepSpeed ZeRO](https://deepspeed.readthedocs.io/en/latest/zero3.html) | DeepSpeed | Which option says how much is prefetched, as in your exercise 3.5? |

# %% [markdown]
# ## What comes next
#
# Notebook **04 FSDP**: PyTorch's implementation of ZeRO-3, and a model that DDP has no memory for.
