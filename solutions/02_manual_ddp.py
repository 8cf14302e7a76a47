# %% [markdown]
# # 02 · Manual DDP
#
# | In short | This notebook |
# |:--|:--|
# | **Time** | 185 minutes in two sittings (70 + 115), 50 more for optional parts |
# | **Needs** | any machine with 2 cores; no GPU |
# | **Core** | 2.1, 2.2, 2.4 to 2.6 |
#
# Distributed data parallelism (DDP) replicates the model on every rank. Each gets part of the
# batch. Averaging gradients in every step lets N copies train as one. You build this with one call
# per parameter, with buckets, and overlapped with backward, and compare it with torch's.

# %% [markdown]
# <details><summary>On one GPU</summary>
#
# With one GPU, two ranks share it and communicate through gloo. Calls, bytes and their order are the
# same as on a node. Seconds are not, because gloo copies the gradients through host memory.
#
# </details>

# %% [markdown]
# ## You will be able to
#
# - say why averaging gradients is right, and when the average needs weights;
# - build a module that trains on N ranks as one process would, except for rounding;
# - group gradients into buckets, and all-reduce each bucket asynchronously.

# %% [markdown]
# ## The model and its gradients

# %%
import contextlib

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import labs
import labs.manual_ddp as lab

labs.warm_up()
PRESET = lab.preset()  # or lab.preset("laptop", ranks=4): any size can be changed
PRESET

# %% [markdown]
# After backward a rank has one gradient for each parameter tensor of the model. Every step must
# average all of them:

# %%
elements = [parameter.numel() for parameter in lab.model_of(PRESET).parameters()]
megabytes = 4 * sum(elements) / 1e6
print(f"{len(elements)} gradients with {sum(elements):,} elements: {megabytes:.1f} MB a step")

# %% [markdown]
# ## Averaging gradients: the derivation
#
# Three ranks train on 1, 1 and 10 examples. In the plain average of their gradients, the first example
# counts 1/3 instead of 1/12: four times too much. Which average is right?
#
# The loss of a batch $B$ is a mean over its examples, and so is its gradient. Split $B$ into shards
# $B_i$:
#
# $$\nabla L(B) = \sum_i \frac{|B_i|}{|B|}\, \nabla L(B_i)$$
#
# Only with equal shards are all weights 1/N. Then it is the plain average.

# %% [markdown]
# ### Exercise 2.1 · Combine the shards' gradients
#
# *Difficulty 1 of 5 · 8 minutes · target: the full batch's gradient, to 5 digits; inputs unchanged*
#
# `gradients` is a list of tensors of the same shape, one for each shard. Return one such tensor. If no
# example of a shard used this parameter, autograd leaves None in place of its gradient: then the gradient
# is zero. The examples of this shard still belong to the batch.

# %%
# Exercise 2.1: the full batch's gradient from the gradients of its shards
def combine(gradients, sizes):
    """gradients[i]: gradient of the mean loss of shard i, which has sizes[i] examples."""
    ### BEGIN SOLUTION
    total, combined = sum(sizes), 0
    for gradient, size in zip(gradients, sizes):
        if gradient is not None:
            combined = combined + gradient * (size / total)
    return combined
    ### END SOLUTION


# %%
lab.check_combine(combine)

# %%
lab.show_combine(combine)

# %% [markdown]
# **Notice:** the plain mean differs from the full batch's gradient. Training with it would run without
# any error, in a different direction.

# %% [markdown]
# ## Broadcasting the initial state
#
# Equal gradients keep the copies equal only if they *start* equal. Without a seed, every rank draws
# its own weights, and N ranks train N models. Therefore rank 0 broadcasts its state: parameters,
# including frozen ones, *and buffers*, such as a BatchNorm's running mean.
#
# | call | returns | blocks? |
# |:--|:--|:--|
# | `dist.broadcast(tensor, src=0)` | None; overwrites the tensor with rank 0's | yes |
# | `model.buffers()` | an iterator | no |
# | `tensor.detach()` | the same memory, not recorded by autograd | no |

# %% [markdown]
# ### Exercise 2.2 · Equal copies
#
# *Difficulty 2 of 5 · 15 minutes · target: every tensor of every rank equals rank 0's, bit for bit; then one
# all-reduce for each trainable parameter*
#
# First the start. Write into the existing tensors, because an optimizer may hold references to them. In
# the check each rank builds its model with a different seed.

# %%
# Exercise 2.2: every rank gets rank 0's state
def broadcast_state(model):
    """Writes rank 0's parameters and buffers into the model of every rank."""
    ### BEGIN SOLUTION
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), src=0)
    ### END SOLUTION


# %% [markdown]
# Then the gradients. After backward each rank has only the gradient of its own share: on 4 ranks, of a quarter of the
# batch. One all-reduce per parameter and a division give the mean over the batch. The checks compare
# with the **reference**: the same model, trained by a single process on the full batch.
#
# | call | returns | blocks? |
# |:--|:--|:--|
# | `dist.all_reduce(tensor)` | None; overwrites the tensor with the sum over ranks | yes |
# | `dist.get_world_size()` | N | no |

# %% [markdown]
# If a rank did not use a parameter, its `parameter.grad` is None. But all ranks must call the same
# collectives, so this rank contributes zeros. Skip frozen parameters.

# %%
# Exercise 2.2, second half: after backward, every gradient becomes the mean over ranks
def average_gradients(model):
    """All-reduces each trainable parameter's gradient once."""
    ### BEGIN SOLUTION
    for parameter in model.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
    ### END SOLUTION


# %%
lab.check_average_gradients(broadcast_state, average_gradients)

# %% [markdown]
# Each strip shows the largest values of one gradient: red is negative, blue is positive. The small
# model has a layer, `sometimes_unused`, that only rank 0 uses here.

# %%
lab.show_gradients(average_gradients, ranks=3)

# %% [markdown]
# **Notice:** before averaging, the strips of a row differ from rank to rank. Afterwards they are
# equal. So the optimizers of all ranks take the same step, and the copies stay equal although no
# parameter is communicated.

# %% [markdown]
# ## Gradient hooks
#
# The training loop should not change, so the averaging must happen *inside* `loss.backward()`. A
# **hook** is a function that autograd calls.
#
# | call | what it does |
# |:--|:--|
# | `parameter.register_post_accumulate_grad_hook(f)` | from now on, autograd calls `f(parameter)` when that gradient is complete |
#
# `f` gets the *parameter*, may read and write `parameter.grad`, and returns None:

# %%
weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
weight.register_post_accumulate_grad_hook(lambda p: print("the hook sees", p.grad))
(3 * weight).sum().backward()

# %% [markdown]
# `lab.Wrapper` is a module that keeps a model as `self.module` and forwards every call to it:

# %%
wrapper = lab.Wrapper(torch.nn.Linear(2, 1))
print(wrapper.module, wrapper(torch.ones(2)).shape)

# %% [markdown]
# ### Exercise 2.4 · The module averages
#
# *Difficulty 2 of 5 · 10 minutes · target: equal to the reference and to torch's DDP, step by step*
#
# In `__init__`, give all ranks the same state. Then register `self.average` as the hook of every
# trainable parameter. This first version requires that every rank uses every parameter. Exercise 2.7
# removes this limit.

# %%
# Exercise 2.4: the training loop does not change, the module averages
class ManualDDP(lab.Wrapper):
    def __init__(self, module):
        super().__init__(module)
        ### BEGIN SOLUTION
        broadcast_state(module)
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.average)
        ### END SOLUTION

    def average(self, parameter):
        ### BEGIN SOLUTION
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
        ### END SOLUTION

# %%
lab.check_manual_ddp(ManualDDP)

# %% [markdown]
# ## Gradient buckets
#
# Your module calls one all-reduce per gradient. Each call costs a fixed time, its **latency**: at
# 0.1 ms, 100 calls cost 10 ms per step. So DDP sends gradients in **buckets** (torch's cap is 25 MiB).
#
# Backward computes the last layer's gradients first. So a bucket with the model's last parameters is
# complete early. A bucket becomes one flat tensor, so all its parameters have the same dtype.
#
# | call | returns |
# |:--|:--|
# | `parameter.numel()`, `parameter.element_size()` | elements; bytes of one element |

# %% [markdown]
# The preset, printed at the top, contains the cap of a bucket. Below it stand the bytes of all
# gradients. How many all-reduces will a step call with such buckets?

# %%
# A guess, for exercise 2.5
### BEGIN SOLUTION
my_guess = 6
### END SOLUTION
labs.guess("2.5", "all-reduces per step, in buckets", my_guess)

# %% [markdown]
# ### Exercise 2.5 · Assign parameters to buckets
#
# *Difficulty 3 of 5 · 15 minutes · target: as few buckets as the cap allows, the last layer first*
#
# `parameters` is what `model.parameters()` returns, an iterator. Return a list of lists.

# %%
# Exercise 2.5: assign parameters to buckets
def make_buckets(parameters, cap_bytes):
    """Lists of trainable parameters, the last one first. A bucket is closed before it would
    exceed cap_bytes; a parameter larger than that gets a bucket of its own."""
    buckets, size = [], 0
    ### BEGIN SOLUTION
    for parameter in reversed([p for p in parameters if p.requires_grad]):
        nbytes = parameter.numel() * parameter.element_size()
        fits = buckets and size + nbytes <= cap_bytes
        if not fits or buckets[-1][0].dtype != parameter.dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += nbytes
    ### END SOLUTION
    return buckets

# %%
lab.check_make_buckets(make_buckets)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Idea: keep one open bucket and its size in bytes. Each parameter either still fits into it, or opens
# the next bucket.
#
# Outline: make a list of the trainable parameters and go through it from its end. Before you append
# a parameter, ask three questions: is there an open bucket, would the sum stay within the cap, and is
# the dtype the same? If one answer is no, open a new bucket. Then append the parameter and add its
# bytes.
#
# </details>

# %%
lab.explore_buckets(make_buckets, PRESET)

# %% [markdown]
# **Notice:** move the cap. With a smaller cap the first bucket is complete earlier. With a larger cap
# there are fewer calls. The last bucket gets what is left, so it is seldom full.

# %% [markdown]
# ## Asynchronous all-reduce
#
# `dist.all_reduce(tensor)` blocks backward until the sum has arrived (with NCCL, it blocks the GPU's
# stream). For 25 MiB on 8 ranks and a link of 25 GB/s this takes 1.8 ms. With `async_op=True` backward
# continues at once.
#
# | call | returns | blocks? |
# |:--|:--|:--|
# | `dist.all_reduce(flat, async_op=True)` | a handle, while gloo or NCCL communicates | no |
# | `handle.wait()` | True, when `flat` holds the sum | yes |
# | `flat.split([2, 3])` | views of 2 and 3 elements, in the same memory | no |

# %%
flat = torch.cat([torch.zeros(2, 2).flatten(), torch.ones(3)])
first, second = flat.split([4, 3])
print(flat, first.view(2, 2), second)

# %% [markdown]
# ### Exercise 2.6 · All-reduce one bucket
#
# *Difficulty 3 of 5 · 15 minutes · target: one asynchronous all-reduce per bucket*
#
# `start` copies a bucket's gradients into one flat tensor of their dtype and starts its all-reduce.
# In place of a gradient that is None it sends zeros. `finish` waits. Only then does it divide and
# give each parameter its part of the flat tensor.

# %%
# Exercise 2.6: one all-reduce for a bucket
def start(bucket):
    """Starts the all-reduce of the bucket's gradients; returns (flat, handle)."""
    ### BEGIN SOLUTION
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    return flat, dist.all_reduce(flat, async_op=True)
    ### END SOLUTION

# %%
# Exercise 2.6, second half
def finish(bucket, flat, handle):
    """Waits, and gives every parameter of the bucket its averaged gradient."""
    ### BEGIN SOLUTION
    handle.wait()
    flat /= dist.get_world_size()
    pieces = flat.split([parameter.numel() for parameter in bucket])
    for parameter, piece in zip(bucket, pieces):
        parameter.grad = piece.view_as(parameter)
    ### END SOLUTION


# %%
lab.check_bucket(start, finish)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Idea: `finish` undoes what `start` did, in the same order.
#
# Outline of `start`: make a list with each gradient, or with zeros of the parameter's shape if the
# gradient is None; flatten each; join them with `torch.cat`; start the all-reduce; return the flat
# tensor and the handle. Outline of `finish`: wait; divide; split by the parameters' numbers of
# elements; give each piece the parameter's shape and make it the parameter's gradient.
#
# </details>

# %% [markdown]
# `lab.BucketedWrapper` is a `lab.Wrapper` with `self.buckets`, the list from exercise 2.5. It calls
# `self.backward_done()` at the end of every backward. The next cell is the simplest use of your two
# functions: it sends everything after backward, so nothing overlaps.

# %%
class BucketedDDP(lab.BucketedWrapper):
    def backward_done(self):
        for bucket in self.buckets:
            finish(bucket, *start(bucket))


def bucketed(model, cap_bytes=PRESET.cap_bytes):
    broadcast_state(model)
    return BucketedDDP(model, make_buckets(model.parameters(), cap_bytes))

# %% [markdown]
# ## Second sitting · 115 minutes
#
# | In short | This sitting |
# |:--|:--|
# | **Core** | 2.7 to 2.10, 2.12 |
# | **Optional** | 2.11 |
# | **In a new kernel** | run the cell of the imports, those of 2.2, 2.4, 2.5 and 2.6, and the cell above |
#
# You will be able to:
#
# - overlap the all-reduce of buckets with backward;
# - accumulate gradients over micro-batches without communication;
# - find overlapped and exposed communication in a timeline;
# - write a script with `DistributedDataParallel`, and start it with `torchrun`.

# %% [markdown]
# ## Overlapping communication with backward
#
# A 7B model has 14 GB of 16-bit gradients. On 8 ranks each sends 24.5 GB per step. At 100 GB/s every
# GPU is idle for a quarter of a second. But a bucket can be sent when its last gradient is ready,
# while backward continues.
#
# | `lab.BucketedWrapper` calls or has | when, what |
# |:--|:--|
# | `self.gradient_ready(parameter)` | when that gradient is complete |
# | `self.backward_done()` | at the end of backward |
# | `self.ready`, `self.started` | a set and a list, empty when backward starts |

# %% [markdown]
# ### Exercise 2.7 · Start a bucket as soon as it is complete
#
# *Difficulty 4 of 5 · 25 minutes · target: each bucket starts before the next gradient is ready*
#
# All ranks must start the buckets in the *same order*, even if a rank did not use some parameter. So
# bucket i starts only after bucket i−1. A bucket that never becomes complete starts in
# `backward_done`.
#
# `parameter in bucket` would compare the tensors' numbers. Ask the set instead, which compares
# objects: `self.ready.issuperset(bucket)`.

# %%
# Exercise 2.7: start a bucket as soon as it is complete
class OverlappedDDP(lab.BucketedWrapper):
    """self.ready (a set) and self.started (a list) are yours, and empty when backward starts."""

    def gradient_ready(self, parameter):
        ### BEGIN SOLUTION
        self.ready.add(parameter)
        for bucket in self.buckets[len(self.started):]:
            if not self.ready.issuperset(bucket):
                break
            self.started.append(start(bucket))
        ### END SOLUTION

    def backward_done(self):
        ### BEGIN SOLUTION
        for bucket in self.buckets[len(self.started):]:
            self.started.append(start(bucket))
        for bucket, begun in zip(self.buckets, self.started):
            finish(bucket, *begun)
        ### END SOLUTION

# %% [markdown]
# The check compares gradients on 2, 3 and 4 ranks, also if only some ranks use a layer. It also looks
# at the *order of events*. And it delays one rank: the others must compute all their gradients
# without waiting for it.
#
# On a CPU, the picture after the check shows a step on a *slow link*. The section "Throughput and
# exposed communication" explains it.

# %%
def overlapped(model, cap_bytes=PRESET.cap_bytes):
    broadcast_state(model)
    return OverlappedDDP(model, make_buckets(model.parameters(), cap_bytes))


lab.check_overlap(overlapped)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Idea: `len(self.started)` is the index of the next bucket to start.
#
# Outline of `gradient_ready`: store the parameter. As long as the next bucket is complete, start it
# and store what `start` returned. One gradient can complete several buckets, because later buckets
# wait for earlier ones. Outline of `backward_done`: start the remaining buckets, in order; then finish
# all buckets, in order.
#
# </details>

# %%
lab.show_in_flight(overlapped, PRESET)

# %% [markdown]
# **Notice:** each bucket starts (black line) when the last of its gradients is ready (dots), while
# backward computes. All buckets share one link, so a bar includes the wait for earlier buckets.
#
# The last bucket cannot start earlier, because it contains the embeddings. GPT-2's head is **tied** to
# them: one weight, used at the start and at the end of the model. Its gradient is complete when both
# uses have added to it.

# %% [markdown]
# Does it train? One rank trains the model on the full batch, and several ranks train it on a share
# each, with the same batches and the same loop. `labs.report(step=..., loss=...)` on rank 0 updates
# the progress bar.

# %%
lab.show_training(overlapped, PRESET)

# %% [markdown]
# The curves are the same line. The ranks add the numbers in another order, so the last digits differ.
# Training amplifies such differences slowly. Nothing else differs.

# %% [markdown]
# ## Gradient accumulation with `no_sync`
#
# A batch that does not fit into memory is split into micro-batches. Their gradients are accumulated
# before one optimizer step. Averaging after each of 4 micro-batches would send every gradient 4 times:
# for 7B, 98 GB instead of 24.5. Inside `with module.no_sync():` backward only accumulates. The next
# backward outside the block averages the sum.
#
# With your buckets, how many all-reduces does a step of 4 micro-batches call if all backwards except
# the last are inside `no_sync`?

# %%
# A guess, for exercise 2.8
### BEGIN SOLUTION
my_guess = 7
### END SOLUTION
labs.guess("2.8", "all-reduces per step of 4 micro-batches, with no_sync", my_guess)

# %% [markdown]
# ### Exercise 2.8 · `no_sync`
#
# *Difficulty 2 of 5 · 10 minutes · target: no collective inside the block, on entry or on exit*
#
# While `self.synchronize` is False, `lab.BucketedWrapper` calls none of your methods. With
# `@contextlib.contextmanager`, code before `yield` runs on entry, code after it on exit. The block may
# exit through an exception, so the code after `yield` belongs into `finally`. Blocks may be nested, so
# restore the flag's old value.

# %%
# Exercise 2.8: no_sync
class AccumulatingDDP(OverlappedDDP):
    @contextlib.contextmanager
    def no_sync(self):
        """Inside the block, backward accumulates and communicates nothing. After the block, however
        it exits, self.synchronize has its old value."""
        ### BEGIN SOLUTION
        before, self.synchronize = self.synchronize, False
        try:
            yield
        finally:
            self.synchronize = before
        ### END SOLUTION

# %%
def accumulating(model, cap_bytes=PRESET.cap_bytes):
    broadcast_state(model)
    return AccumulatingDDP(model, make_buckets(model.parameters(), cap_bytes))


lab.check_no_sync(accumulating)

# %%
lab.show_accumulation(accumulating, PRESET, parts=4)

# %% [markdown]
# *Question.* torch's DDP reads its flag in *forward*, your module in backward. A loop calls
# `loss = module(**part).loss` before the `with` block, and only `loss.backward()` inside it. What
# happens with your module, and what with torch's?
#
# <details><summary>Answer</summary>
#
# Your module communicates nothing. torch's DDP has prepared its reduction in forward, so it all-reduces
# in this backward, and `no_sync` saves nothing. With torch, forward must be inside the block, too.
#
# </details>

# %% [markdown]
# ## Unequal micro-batches
#
# `module(**part).loss` is a mean over the examples of that part only. With micro-batches of 3, 1 and
# 2 examples, the plain mean of their losses weights the single example three times as much as each of
# the three. In October 2024 Hugging Face's `Trainer` was found to
# *[do this with tokens](https://huggingface.co/blog/gradient_accumulation)*.
#
# The right weights are those of exercise 2.1, now for the parts of one rank's batch.

# %% [markdown]
# ### Exercise 2.9 · Accumulate over unequal micro-batches
#
# *Difficulty 3 of 5 · 15 minutes · target: the full batch's gradient, one synchronization, one
# micro-batch in memory at a time*
#
# Each rank gets a list of its own. The sizes are the same on all ranks.
#
# | call | returns |
# |:--|:--|
# | `len(part["x"])` | the number of examples of a micro-batch |
# | `module(**part).loss` | their mean loss |
# | `contextlib.nullcontext()` | a context that does nothing, in place of `no_sync()` |

# %%
# Exercise 2.9: accumulate over unequal micro-batches, synchronize once
def accumulate(module, micro_batches):
    """micro_batches: this rank's, each {"x", "y"}. Leaves the gradient of the mean over all."""
    ### BEGIN SOLUTION
    examples = sum(len(part["x"]) for part in micro_batches)
    for number, part in enumerate(micro_batches, 1):
        last = number == len(micro_batches)
        with contextlib.nullcontext() if last else module.no_sync():
            (module(**part).loss * (len(part["x"]) / examples)).backward()
    ### END SOLUTION


# %%
lab.check_accumulate(accumulate, accumulating)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Idea: only the last backward is outside of `no_sync`. Everything else is the same for all parts.
#
# Outline: add up the examples of all parts. For each part, choose its context: `module.no_sync()`, or
# `contextlib.nullcontext()` for the last part. Inside it, run forward, multiply the loss by the part's
# share of the examples, and run backward. Do not collect the losses in a list: it would keep all
# activations in memory.
#
# </details>

# %% [markdown]
# The check gives all ranks the same sizes. So each rank counts 1/N, as your averaging assumes. If ranks
# have different numbers of examples or tokens, divide `len(part["x"])` by the *mean over the ranks* of
# their numbers of examples. One more all-reduce, of a single number, computes this mean.

# %% [markdown]
# ## Throughput and exposed communication
#
# Four modules now train the same GPT-2 on the same data, in turns. On a CPU, gloo needs the cores that
# compute, so overlap gains nothing. Therefore the lab gives each rank a **slow link**: a collective
# takes latency + bytes / bandwidth of real time and leaves the cores free, as on a GPU. The bytes of a
# step take half of its computing time, and each latency 1 % of it. GPUs use their real link.

# %% [markdown]
# ### Exercise 2.10 · Compare with `DistributedDataParallel`
#
# *Difficulty 2 of 5 · 20 minutes · target: torch's DDP with your cap, two shares of any step, and one
# reason for each of two gains*
#
# torch's class takes the cap in MiB (2²⁰ bytes): `DistributedDataParallel(model, bucket_cap_mb=25)`.

# %%
# Exercise 2.10: torch's DDP with your cap
def torch_ddp(model, cap_bytes=PRESET.cap_bytes):
    """torch's DDP around the model, with buckets of cap_bytes."""
    ### BEGIN SOLUTION
    return DistributedDataParallel(model, bucket_cap_mb=cap_bytes / 2**20)
    ### END SOLUTION

# %% [markdown]
# The ratio of communication to computing says how much there is to hide. It counts all communication,
# overlapped or **exposed**. The seconds of a step are those of its phases: forward, backward, optimizer,
# and exposed communication, in which the rank only waits. The second share says how much a module does
# hide.

# %%
# Exercise 2.10, continued: how much communication there is, and which share is overlapped
def communication_shares(communication, phases):
    """communication: seconds in which a collective is in flight in a step; phases: the step's
    seconds, as in {"forward": 0.2, "backward": 0.4, "exposed": 0.1, "optimizer": 0.1}.
    Returns (communication / computing, the overlapped share of communication)."""
    ### BEGIN SOLUTION
    exposed = phases["exposed"]
    computing = sum(phases.values()) - exposed
    overlapped = communication - exposed
    return communication / computing, overlapped / communication
    ### END SOLUTION


# %%
lab.check_measurement(torch_ddp, communication_shares)

# %% [markdown]
# First guess: the throughput of your overlapped module, as a share of torch DDP's, for example 0.8.
#
# In each turn every module takes one timed step and one under the profiler. The comparison takes up to
# a minute.

# %%
# A guess, for exercise 2.10
### BEGIN SOLUTION
my_guess = 0.9
### END SOLUTION
labs.guess("2.10", "overlapped, as a share of torch DDP's throughput", my_guess)

# %%
variants = {
    "one call per parameter": ManualDDP,
    "bucketed, after backward": bucketed,
    "bucketed, overlapped": overlapped,
    "torch DDP": torch_ddp,
}
compared = lab.compare(variants, PRESET)
compared

# %% [markdown]
# The first speed-up comes from bucketing, the second from overlapping. Write down why, from what the
# cell has printed. The pictures below show whether your reasons hold.

# %%
# Exercise 2.10, continued: your two reasons, a sentence each, in quotes; no check reads them
### BEGIN SOLUTION
why_buckets = "As many bytes in fewer calls: a step pays fewer latencies."
why_overlap = "Buckets are in flight while backward computes, so a rank waits less."
### END SOLUTION

# %%
lab.show_calls(compared)

# %%
lab.show_bytes(compared)

# %% [markdown]
# **Notice:** buckets change the number of calls, never the bytes. Every gradient is all-reduced once,
# 4 bytes for each of Ψ parameters. (The "2Ψ" above counts elements on the link: an all-reduce sends its
# Ψ elements twice.)
#
# With one preset, calls and bytes are the same on every machine. torch closes a bucket *after* its size
# has reached the cap, your function *before* it would exceed the cap. So the counts can differ.

# %%
lab.show_timelines(compared, "bucketed, after backward", "bucketed, overlapped")

# %% [markdown]
# **Notice:** both steps send the same buckets over the same link. After backward they are exposed
# (hatched). Overlapped, the first buckets are in flight while backward computes, so less is exposed
# over all ranks.
#
# The end stays exposed, because the last bucket cannot start before the last gradient is ready. An
# all-reduce also waits for the slower rank, so its length varies. The thin strips of backward between
# the bars are your `finish`.

# %%
lab.show_phases(compared, communication_shares)

# %% [markdown]
# **Notice:** compare the hatched parts. One call per parameter pays a latency for each parameter. Buckets
# pay few. Overlap hides a part of what is left: your second number. If the first one is above 1, some communication
# is exposed however well it overlaps.
#
# Both pictures show the recorded step that is nearest to the median of the steps below. If it differs
# from the median by more than a third, nothing is drawn, because it would contradict the throughput.

# %%
lab.show_throughput(compared)

# %% [markdown]
# **Notice:** throughput grows from one call per parameter to buckets, and from buckets to overlap. Are
# these your two reasons? With overlap, your few lines come close to torch's DDP, which does the same in
# C++.
#
# The gains depend on the link. With a faster link all four modules come closer together. On a busy
# laptop the last two can swap places.

# %% [markdown]
# ## Optional: rebuilding buckets in gradient order
#
# Your buckets follow the order in which layers are *registered*, from the end. But a model may
# register its layers in any order. The next cell trains one small model twice with `overlapped`. Each
# bucket waits for earlier ones, so one late bucket at the front delays all others.

# %%
lab.show_starts(overlapped)

# %% [markdown]
# torch's DDP learns the order. In the first backward it records when each gradient becomes ready. Rank
# 0 broadcasts its list, and all ranks rebuild their buckets by it.
#
# Without `find_unused_parameters`, the first backward has a single bucket with all gradients, so nothing
# overlaps in step 1. Later, with torch's default cap, the first bucket closes at 1 MiB and so starts
# early. The others close at 25 MiB. If you pass a cap, it applies to all buckets.

# %% [markdown]
# Build this without `lab.Wrapper` and `lab.BucketedWrapper`. You may keep your functions of 2.2, 2.5
# and 2.6. To notice the end of backward, torch's DDP uses a private callback of autograd's engine:
#
# | call, inside a hook | what it does |
# |:--|:--|
# | `after_backward(f)` | calls `f()` once, at the end of this backward |

# %%
def after_backward(function):
    torch.autograd.Variable._execution_engine.queue_callback(function)


def hook(parameter):
    print("a gradient is ready")
    after_backward(lambda: print("backward is over"))


ones = torch.nn.Parameter(torch.ones(2))
ones.register_post_accumulate_grad_hook(hook)
ones.sum().backward()

# %% [markdown]
# ### Exercise 2.11 · Rebuild buckets in gradient order
#
# *Difficulty 5 of 5 · 45 minutes · target: in both rows of the table all buckets but one, from step 2*
#
# You may choose other names: the check only calls `ReadyOrderDDP(module, cap_bytes)`. Gradients may
# become ready in a different order on each rank, and rank 0 may not use some parameter in the first
# step. In both cases all ranks must agree on one order.

# %%
# Exercise 2.11: one order for all ranks
def agree(parameters, ready):
    """On every rank a list of all `parameters`: first those of rank 0's list `ready`, in its
    order."""
    ### BEGIN SOLUTION
    number = {parameter: i for i, parameter in enumerate(parameters)}
    order = ready + [p for p in reversed(parameters) if p not in set(ready)]
    numbers = torch.tensor([number[p] for p in order], device=labs.device())
    dist.broadcast(numbers, src=0)
    return [parameters[i] for i in numbers.tolist()]
    ### END SOLUTION

# %%
# Exercise 2.11, continued: the module, with its state and its hooks
class ReadyOrderDDP(torch.nn.Module):
    def __init__(self, module, cap_bytes=PRESET.cap_bytes):
        super().__init__()
        self.module, self.cap_bytes = module, cap_bytes
        ### BEGIN SOLUTION
        broadcast_state(module)
        self.trainable = [p for p in module.parameters() if p.requires_grad]
        self.buckets, self.learned = make_buckets(self.trainable, cap_bytes), False
        self.ready, self.started = [], []
        for parameter in self.trainable:
            parameter.register_post_accumulate_grad_hook(lambda p: when_ready(self, p))
        ### END SOLUTION

    def forward(self, *inputs, **named_inputs):
        return self.module(*inputs, **named_inputs)

# %%
# Exercise 2.11, continued: one gradient is ready
def when_ready(ddp, parameter):
    ### BEGIN SOLUTION
    if not ddp.ready:
        after_backward(lambda: when_over(ddp))
    ddp.ready.append(parameter)
    for bucket in ddp.buckets[len(ddp.started):]:
        if not set(ddp.ready).issuperset(bucket):
            break
        ddp.started.append(start(bucket))
    ### END SOLUTION

# %%
# Exercise 2.11, continued: backward is over
def when_over(ddp):
    ### BEGIN SOLUTION
    for bucket in ddp.buckets[len(ddp.started):]:
        ddp.started.append(start(bucket))
    for bucket, begun in zip(ddp.buckets, ddp.started):
        finish(bucket, *begun)
    if not ddp.learned:
        order = agree(ddp.trainable, ddp.ready)
        ddp.buckets, ddp.learned = make_buckets(order[::-1], ddp.cap_bytes), True
    ddp.ready, ddp.started = [], []
    ### END SOLUTION


# %%
lab.check_ready_order(ReadyOrderDDP)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Idea: it is exercise 2.7 with a list instead of the set, because a list keeps the order, and with one
# more step at the end of the first backward.
#
# Outline: the first gradient of each backward queues the callback. The callback starts the remaining
# buckets and finishes all. Then, only in the first backward, all ranks agree on the order and rebuild
# the buckets. `make_buckets` goes through its list from the end. Do not broadcast parameters:
# broadcast their indices in `module.parameters()`, which are the same on all ranks. A parameter that
# rank 0 did not use needs a position, too. At the end, clear the state of this backward.
#
# </details>

# %%
lab.show_starts(ReadyOrderDDP)

# %% [markdown]
# Compare the lower row with the one above the exercise. Step 1 is the same, because the module is still
# learning the order. From step 2 on, the order in which a model registers its layers has no effect.
#
# The ranks agree on the order only once. If a later step has another order, some buckets start later,
# but the gradients are still right.

# %% [markdown]
# ## A training script for `torchrun`
#
# So far `launch` has started the ranks and joined them in a process group. In a script, `torchrun` starts
# the same file once for each rank, and describes the group in environment variables. A job is then a
# file that needs nothing of this workbook.

# %% [markdown]
# | in your file | is |
# |:--|:--|
# | `dist.init_process_group(backend)` | joins the process group; `None` means NCCL for GPU tensors and gloo for CPU tensors |
# | `os.environ["LOCAL_RANK"]`, `["LOCAL_WORLD_SIZE"]` | this rank's number on its machine, and the number of ranks there |
# | `DistributedSampler(data, seed=…)` | a rank's part of the indices; `set_epoch(epoch)` changes their order |
# | `DataLoader(data, batch_size=…, sampler=…)` | the rank's batches |
# | `DistributedDataParallel(model)` | the module of this notebook; its attribute `module` is the model |

# %% [markdown]
# ### Exercise 2.12 · `ddp.py`
#
# *Difficulty 3 of 5 · 25 minutes · target: gradients and parameters as one process has them, on 2 and 3
# ranks; a file that a GPT-2 without DDP can load*
#
# The next cell writes the file `ddp.py`. Fill in its two gaps. The loss is the cross-entropy of each
# position's logits with the next token. Rank 0 prints a line for each epoch, and finally saves the
# model's state dict with `torch.save` to `options.checkpoint`.

# %%
lab.write_script("ddp.py")

# %%
lab.check_ddp("ddp.py")

# %% [markdown]
# <details><summary>Hint</summary>
#
# First gap: NCCL needs a GPU for each rank. If there are fewer (`torch.accelerator.device_count()`)
# than ranks on this machine, use gloo. With GPUs, `torch.accelerator.set_device_index` selects one.
#
# Second gap: create sampler, loader, wrapper and optimizer; then write two loops. What must change from
# epoch to epoch? Which ranks may print, and which rank writes? Whose state dict has the names of a
# GPT-2: the wrapper's, or the model's?
#
# </details>

# %% [markdown]
# The check runs your file on ranks that it forks. The next cell runs the command that you would type in
# a terminal, and prints it.

# %%
lab.torchrun("ddp.py", "--epochs", 2, ranks=2)

# %% [markdown]
# Two processes print one line for each epoch and write one file. To load that file you need no process
# group. The printed loss is that of rank 0's last batch. Notebook 06 reports the mean over all ranks.

# %% [markdown]
# ## I can …
#
# - derive the weights for shards of unequal size
# - name three kinds of state that must be broadcast
# - explain why every rank must start its buckets in the same order
# - weight unequal micro-batches, and synchronize them once
# - find the exposed communication in a timeline, and compute the communication / computing ratio
# - write a training script with DistributedDataParallel, and start it with torchrun

# %% [markdown]
# ## How it usually goes wrong
#
# - **A sum instead of a mean**: the model trains, with gradients N times too large.
# - **Buffers not broadcast**: the copies agree in every parameter, but compute different losses.
# - **A parameter unused on one rank**: the other ranks wait for it in an all-reduce.
# - **The last bucket not sent**: the first layers train on their own shard.
# - **Waiting after each start**: correct, but nothing overlaps.
# - **Unequal parts averaged plainly**: it trains, on a different loss.

# %% [markdown]
# ## What to read
#
# | read | by | a question |
# |:--|:--|:--|
# | [PyTorch Distributed](https://arxiv.org/abs/2006.15704) | S. Li et al., VLDB 2020, section 3.2 | Figure 2 (a, b) sends 60 million parameters in calls of several sizes. Which two of your bars differ for the same reason? Which lines of 2.7 prevent the failures of Figure 3? |
# | [Distributed Data Parallel](https://docs.pytorch.org/docs/stable/notes/ddp.html) | PyTorch's notes, internal design | torch fills buckets in about the parameters' reverse order. What would your picture of buckets in flight look like in their order? |

# %% [markdown]
# | read | by | a question |
# |:--|:--|:--|
# | [Accurate, Large Minibatch SGD](https://arxiv.org/abs/1706.02677) | P. Goyal et al., 2017, section 3 | Which mistake in averaging does its third remark warn of? By what factor would it change your gradients on N ranks? |
# | [Fixing Gradient Accumulation](https://huggingface.co/blog/gradient_accumulation) | Hugging Face, 2024 | By what do they divide now, and what is that in exercise 2.9? |
# | [DistributedDataParallel](https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html) | PyTorch, `find_unused_parameters` | What does it cost, and what does your module do instead? |

# %% [markdown]
# ## What comes next
#
# Notebook **03 ZeRO stages**: every rank still holds all parameters, gradients and optimizer state. Is
# this necessary?
