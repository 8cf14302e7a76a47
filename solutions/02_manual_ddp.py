# %% [markdown]
# # 02 · Manual DDP
#
# | | |
# |:--|:--|
# | **Time** | 180 minutes, and 45 for the optional exercise |
# | **Needs** | any machine with 2 cores; no GPU |
#
# Distributed data parallelism (DDP) keeps a whole model on every rank and gives each a share of the
# batch. Averaging gradients once a step lets N copies train as one. You build this with one call per
# parameter, then in buckets, then overlapped with backward, and compare with torch's.

# %% [markdown]
# *On one GPU* two ranks share it, with gloo: calls, bytes and their order are a node's. Seconds are
# not, because gradients pass through the CPU's memory.

# %% [markdown]
# ## You will be able to
#
# - say why averaging gradients is right, and when it needs weights;
# - build a module that trains on N ranks as one process would, except for rounding;
# - cut gradients into buckets and send each while backward goes on;
# - read from a timeline which communication is overlapped and which is exposed.

# %% [markdown]
# ## What is trained here

# %%
import contextlib

import torch
import torch.distributed as dist

import labs
import labs.manual_ddp as lab

labs.warm_up()
PRESET = lab.preset()  # or lab.preset("laptop", ranks=4): any size can be changed
PRESET

# %% [markdown]
# A rank's backward leaves one gradient for each parameter tensor of the model. All of them must be
# averaged in every step:

# %%
sizes = [parameter.numel() for parameter in lab.model_of(PRESET).parameters()]
print(f"{len(sizes)} gradients with {sum(sizes):,} elements: {4 * sum(sizes) / 1e6:.1f} MB a step")

# %% [markdown]
# ## Why averaging is right
#
# Three ranks train on 1, 1 and 10 examples. If you average their gradients plainly, a single example
# counts 1/3 instead of 1/12: four times too much. So first: which average is right?
#
# The loss of a batch $B$ is a mean over its examples, and so is its gradient. Cut $B$ into shards
# $B_i$:
#
# $$\nabla L(B) = \sum_i \frac{|B_i|}{|B|}\, \nabla L(B_i)$$
#
# With equal shards all weights are 1/N, and only then is it the plain average.

# %% [markdown]
# ### Exercise 2.1 · Combine the shards' gradients
#
# *Difficulty 1 of 5 · 5 minutes · target: the full batch's gradient, to 5 digits; inputs unchanged*
#
# `gradients` is a list of tensors, one for each shard, all of one shape. Return one such tensor.

# %%
# Exercise 2.1: the full batch's gradient from the gradients of its shards
def combine(gradients, sizes):
    """gradients[i]: gradient of the mean loss of shard i, which has sizes[i] examples."""
    ### BEGIN SOLUTION
    total = sum(sizes)
    return sum(gradient * (size / total) for gradient, size in zip(gradients, sizes))
    ### END SOLUTION


# %%
lab.check_combine(combine)

# %%
lab.show_combine(combine)

# %% [markdown]
# **Notice:** compare the plain mean with the whole batch. With the plain mean, training would run,
# and no error would tell you that it goes in another direction.

# %% [markdown]
# ## One initial state for all
#
# Equal gradients keep the copies equal only if they *begin* equal. In a script without a seed every
# rank draws its own weights: N ranks would train N models. So rank 0's state must reach all:
# parameters, frozen ones too, *and buffers*, such as a BatchNorm's running mean.
#
# | call | returns | blocks? |
# |:--|:--|:--|
# | `dist.broadcast(tensor, src=0)` | None; writes rank 0's numbers into all ranks' | yes |
# | `model.buffers()` | an iterator | no |
# | `tensor.detach()` | the same memory, not recorded by autograd | no |

# %% [markdown]
# ### Exercise 2.2 · Broadcast the state
#
# *Difficulty 1 of 5 · 5 minutes · target: every tensor of every rank equals rank 0's, to the bit*
#
# Write into the tensors that are there, because an optimizer may hold them already. In the check
# each rank builds its model with a seed of its own.

# %%
# Exercise 2.2: every rank gets rank 0's state
def broadcast_state(model):
    """Writes rank 0's parameters and buffers into the model of every rank."""
    ### BEGIN SOLUTION
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), src=0)
    ### END SOLUTION


# %%
lab.check_broadcast_state(broadcast_state)

# %% [markdown]
# ## Average the gradients
#
# After backward each rank holds the gradient of its own share only: on 4 ranks, of a quarter of the
# batch. One all-reduce per parameter and a division turn it into the mean over the batch. The checks
# compare with the **reference**: a twin of the model that a single process trains on the whole
# batch.
#
# | call | returns | blocks? |
# |:--|:--|:--|
# | `dist.all_reduce(tensor)` | None; writes the sum over ranks into the tensor | yes |
# | `dist.get_world_size()` | N | no |

# %% [markdown]
# ### Exercise 2.3 · Average the gradients
#
# *Difficulty 2 of 5 · 10 minutes · target: one all-reduce for each trainable parameter*
#
# A trap: where a rank did not use a parameter, `parameter.grad` is None. All ranks must call the
# same collectives, so this rank takes part with zeros. Frozen parameters stay out.

# %%
# Exercise 2.3: after backward, every gradient becomes the mean over ranks
def average_gradients(model):
    """Communicates each trainable parameter's gradient once."""
    ### BEGIN SOLUTION
    for parameter in model.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
    ### END SOLUTION


# %%
lab.check_average_gradients(average_gradients)

# %% [markdown]
# Each strip shows the largest values of one gradient: red is negative, blue is positive. The small
# model has a layer, `sometimes_unused`, that here only rank 0's share of the batch uses.

# %%
lab.show_gradients(average_gradients, ranks=3)

# %% [markdown]
# **Notice:** before, the strips of a row differ from rank to rank; after, they are equal. So the
# optimizers of all ranks do the same step, and the copies stay equal although no parameter is ever
# sent.

# %% [markdown]
# ## A module that averages by itself
#
# The training loop should not change, so averaging must happen *inside* `loss.backward()`. A
# **hook** is a function that autograd calls.
#
# | call | what it does |
# |:--|:--|
# | `parameter.register_post_accumulate_grad_hook(f)` | from now on, autograd calls `f(parameter)` when that gradient is complete |
#
# `f` gets the *parameter*, reads and writes `parameter.grad`, and returns None:

# %%
weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
weight.register_post_accumulate_grad_hook(lambda p: print("the hook sees", p.grad))
(3 * weight).sum().backward()

# %% [markdown]
# ### Exercise 2.4 · The module averages
#
# *Difficulty 2 of 5 · 10 minutes · target: equal to the reference and to torch's DDP, step by step*
#
# `lab.Wrapper` keeps the model as `self.module` and passes every call on to it. In `__init__`, give
# all ranks the same state, and register `self.average` as the hook of every trainable parameter. This
# first version needs every rank to use every parameter; exercise 2.7 removes that limit.

# %%
# Exercise 2.4: the loop stays plain, the module averages
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
# ## Buckets
#
# Your module calls one all-reduce per gradient. Each call costs a fixed time, its **latency**: at
# 0.1 ms, 100 calls cost 10 ms a step. So gradients are sent together, in **buckets** (torch's
# cap is 25 MiB).
#
# Backward reaches the last layer first. So a bucket that begins at the end of the model is
# complete early. A bucket becomes one flat tensor, so all its parameters have one dtype.
#
# | call | returns |
# |:--|:--|
# | `parameter.numel()`, `parameter.element_size()` | elements; bytes of one element |

# %% [markdown]
# How large a bucket may be is part of the preset, which is printed at the top, above the bytes of
# all gradients. How many all-reduces will a step take in such buckets? Guess, then write the function
# that cuts them.

# %%
# A guess, for exercise 2.5
### BEGIN SOLUTION
my_guess = 6
### END SOLUTION
labs.guess("2.5", "all-reduces per step, in buckets", my_guess)

# %% [markdown]
# ### Exercise 2.5 · Cut the parameters into buckets
#
# *Difficulty 3 of 5 · 15 minutes · target: as few buckets as the cap allows, the last layer first*
#
# `parameters` is what `model.parameters()` returns, an iterator. Return a list of lists.

# %%
# Exercise 2.5: cut the parameters into buckets
def make_buckets(parameters, cap_bytes):
    """Lists of trainable parameters, the last one first. A bucket is closed before it would
    exceed cap_bytes; a parameter larger than that has one to itself."""
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

# %% [markdown]
# <details><summary>Hint</summary>
#
# Idea: keep one bucket open and remember its size in bytes. Each parameter either still fits into
# it, or it begins the next bucket.
#
# Outline: make a list of the trainable parameters and go through it from its end. Before you append
# a parameter, ask three things: is there an open bucket, would the sum stay within the cap, and is
# the dtype the same? If one answer is no, open a bucket. Then append, then add up the bytes.
#
# </details>

# %%
lab.check_make_buckets(make_buckets)

# %%
lab.explore_buckets(make_buckets, PRESET)

# %% [markdown]
# **Notice:** move the cap. With a smaller one the first bucket is complete earlier; with a larger
# one there are fewer calls. The last bucket holds what is left, so it is seldom full.

# %% [markdown]
# ## One bucket is reduced
#
# After `dist.all_reduce(tensor)` backward stands still until the sum has arrived (with NCCL, the GPU
# does). For 25 MiB on 8 ranks and a link of 25 GB/s that takes 1.8 ms. With `async_op=True` backward
# goes on at once.
#
# | call | returns | blocks? |
# |:--|:--|:--|
# | `dist.all_reduce(flat, async_op=True)` | a handle, while gloo or NCCL goes on working | no |
# | `handle.wait()` | True, when `flat` holds the sum | yes |
# | `flat.split([2, 3])` | pieces of 2 and 3 elements, in the same memory | no |

# %%
flat = torch.cat([torch.zeros(2, 2).flatten(), torch.ones(3)])
first, second = flat.split([4, 3])
print(flat, first.view(2, 2), second)

# %% [markdown]
# ### Exercise 2.6 · Send one bucket
#
# *Difficulty 3 of 5 · 15 minutes · target: one asynchronous all-reduce for the whole bucket*
#
# `start` copies a bucket's gradients into one flat tensor of their dtype and begins its all-reduce.
# In place of a gradient that is None, zeros are sent. `finish` waits, and only then divides and
# gives each parameter its piece.

# %%
# Exercise 2.6: one all-reduce for a whole bucket
def start(bucket):
    """Begins the all-reduce of the bucket's gradients; returns (flat, handle)."""
    ### BEGIN SOLUTION
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    return flat, dist.all_reduce(flat, async_op=True)
    ### END SOLUTION

# %% [markdown]
# <details><summary>Hint</summary>
#
# Idea: `finish` undoes what `start` did, in the same order.
#
# Outline of `start`: a list with each gradient, or zeros of the parameter's shape where it is None;
# flatten each; put them one after the other with `torch.cat`; begin the all-reduce; return the flat
# tensor and the handle. Outline of `finish`: wait; divide; split by the parameters' numbers of
# elements; give each piece the parameter's shape and make it the parameter's gradient.
#
# </details>

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
# `lab.BucketedWrapper` is a `lab.Wrapper` that also holds `self.buckets`, the list from exercise 2.5,
# and calls `self.backward_done()` at the end of every backward. Here is the simplest use of your two
# functions: everything is sent after backward, so nothing overlaps.

# %%
class BucketedDDP(lab.BucketedWrapper):
    def backward_done(self):
        for bucket in self.buckets:
            finish(bucket, *start(bucket))


def bucketed(model, cap_bytes=PRESET.cap_bytes):
    broadcast_state(model)
    return BucketedDDP(model, make_buckets(model.parameters(), cap_bytes))

# %% [markdown]
# ## Overlap
#
# A 7B model has 14 GB of 16-bit gradients. On 8 ranks each sends 24.5 GB in a step; at 100 GB/s no
# GPU computes for 0.25 seconds. But a bucket can leave as soon as its last gradient is ready, while
# backward goes on.
#
# | `lab.BucketedWrapper` calls or holds | when, what |
# |:--|:--|
# | `self.gradient_ready(parameter)` | when that gradient is complete |
# | `self.backward_done()` | at the end of backward |
# | `self.ready`, `self.started` | a set and a list for you; each backward begins with them empty |

# %% [markdown]
# ### Exercise 2.7 · Start a bucket as soon as it is complete
#
# *Difficulty 4 of 5 · 25 minutes · target: each bucket leaves before the next gradient is ready*
#
# All ranks must start the buckets in the *same order*, also where a rank did not use some
# parameter: bucket i leaves only after bucket i−1. A bucket that never becomes complete leaves in
# `backward_done`.
#
# `parameter in bucket` would compare the tensors' numbers, so ask the set, which compares objects:
# `self.ready.issuperset(bucket)`.

# %%
# Exercise 2.7: start a bucket as soon as it is complete
class OverlappedDDP(lab.BucketedWrapper):
    """self.ready (a set) and self.started (a list) are yours; each backward finds them empty."""

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
# <details><summary>Hint</summary>
#
# Idea: `len(self.started)` is the number of the next bucket whose turn it is.
#
# Outline of `gradient_ready`: remember the parameter. As long as the next bucket is complete, start
# it and remember what `start` returned. One gradient can complete several buckets, if they waited
# for an earlier one. Outline of `backward_done`: start the buckets that are left, in order; then
# finish all, in order.
#
# </details>

# %% [markdown]
# The check compares numbers on 2, 3 and 4 ranks, also where only some ranks use a layer. It also
# looks at the *order of events*. And it lets one rank begin backward late: the others must compute
# all their gradients without waiting for it.
#
# On a CPU the picture after the check comes from a step on a *slow link*, which the section
# "Measured" explains.

# %%
def overlapped(model, cap_bytes=PRESET.cap_bytes):
    broadcast_state(model)
    return OverlappedDDP(model, make_buckets(model.parameters(), cap_bytes))


lab.check_overlap(overlapped)

# %%
lab.show_in_flight(overlapped, PRESET)

# %% [markdown]
# **Notice:** each bucket leaves (black line) when the last of its gradients is ready (dots), while
# backward computes. All share one link, so a bar includes the wait for the buckets before it. The
# last bucket cannot leave earlier: it holds the embeddings. GPT-2's head is **tied** to them: one
# weight, used first and last, with one gradient, which is complete when both uses have added to it.

# %% [markdown]
# Does it train? The same model, batches and loop run on one rank with the whole batch, and on
# several ranks with a share each. `labs.report(step=..., loss=...)` on rank 0 moves the bar.

# %%
lab.show_training(overlapped, PRESET)

# %% [markdown]
# **Notice:** the curves are the same line. The ranks add the numbers in another order, so the last
# digits differ, and training lets such differences grow slowly; nothing else differs.

# %% [markdown]
# ## Accumulate without communicating
#
# A batch that does not fit into memory is split into micro-batches, whose gradients add up before
# one step. Averaging after each of 4 would send every gradient 4 times: for 7B, 98 GB, not 24.5.
# Inside `with module.no_sync():` backward only accumulates; the next backward outside averages the
# sum.
#
# `lab.BucketedWrapper` calls none of your methods while `self.synchronize` is False. With
# `@contextlib.contextmanager`, what stands before `yield` runs on entering the block, what stands
# after it on leaving.

# %% [markdown]
# With your buckets, how many all-reduces does one step with 4 micro-batches take if all but the last
# backward are inside `no_sync`?

# %%
# A guess, for exercise 2.8
### BEGIN SOLUTION
my_guess = 7
### END SOLUTION
labs.guess("2.8", "all-reduces per step of 4 micro-batches, with no_sync", my_guess)

# %% [markdown]
# ### Exercise 2.8 · no_sync
#
# *Difficulty 2 of 5 · 10 minutes · target: no collective inside the block, on entering or leaving it*
#
# Two things are easily forgotten: the block can end by an exception, and a block can stand inside of
# another.

# %%
# Exercise 2.8: no_sync
class AccumulatingDDP(OverlappedDDP):
    @contextlib.contextmanager
    def no_sync(self):
        """Inside the block, backward accumulates and communicates nothing. However the block ends,
        self.synchronize is afterwards what it was before."""
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
# *Question.* torch's DDP reads its flag in *forward*, yours in backward. A loop calls
# `loss = module(**part).loss` before the `with` and only `loss.backward()` inside. What happens with
# yours, and what with torch's?
#
# <details><summary>Answer</summary>
#
# Yours communicates nothing. torch's has prepared its reduction in forward, so it all-reduces in
# this backward, and `no_sync` saves nothing. With torch, forward belongs inside the block, too.
#
# </details>

# %% [markdown]
# ## The trap: unequal micro-batches
#
# `module(**part).loss` is a mean over the examples of that part only. With micro-batches of 3, 1 and
# 2 examples, the plain mean of the losses lets the one example count three times as much as one of
# the three. In October 2024 Hugging Face's `Trainer` was found to do this with tokens.
#
# It is exercise 2.1 again, now with parts of one rank's batch. A part has `len(part["x"])` examples.

# %% [markdown]
# ### Exercise 2.9 · Accumulate over unequal micro-batches
#
# *Difficulty 3 of 5 · 15 minutes · target: the full batch's gradient, one synchronization, one
# micro-batch in memory at a time*
#
# Each rank gets its own list; the sizes are the same on all ranks.

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
# Idea: only the last backward is outside of `no_sync`; everything else is the same for all parts.
#
# Outline: add up the examples of all parts. For each part, choose its block: `module.no_sync()`, or
# `contextlib.nullcontext()` for the last one. Inside it, run forward, multiply the loss by the
# part's share of the examples, and run backward. A list of all losses would keep all activations in
# memory.
#
# </details>

# %% [markdown]
# **Notice:** the check gives all ranks the same sizes, so each rank counts 1/N, as your averaging
# assumes. Where ranks have different numbers of examples, or of tokens, a part's weight is
# `len(part["x"])` divided by the *mean over the ranks* of their examples. One more all-reduce, of a
# single number, tells a rank that mean.

# %% [markdown]
# ## Measured
#
# Four modules now train the same GPT-2 on the same data, in turns. On a CPU, gloo moves bytes
# with the cores that compute, so hiding a call gains nothing. Therefore each rank gets a *slow
# link*: a collective takes its latency and bytes / bandwidth of real time while the cores are free,
# as on a GPU. A step's bytes take half of the time that it computes, each latency 1 % of it. GPUs use
# their real link.

# %% [markdown]
# First your guess: the throughput of your overlapped module, as a share of torch DDP's, for example
# 0.8. `lab.torch_ddp` is torch's DDP with your cap. In each turn every module does one timed step and
# one under the profiler. That takes up to a minute.

# %%
# A guess, for exercise 2.10
### BEGIN SOLUTION
my_guess = 0.9
### END SOLUTION
labs.guess("2.10", "overlapped, as a share of torch DDP's throughput", my_guess)

# %% [markdown]
# ### Exercise 2.10 · Read the measurement
#
# *Difficulty 2 of 5 · 15 minutes · target: one reason for each of the two gains in throughput*
#
# The first gain is from one call per parameter to buckets, the second from buckets to overlap. The
# cell below measures both. Write your two reasons into the cell after it, from what it prints: the
# pictures that follow show whether they hold.

# %%
# Exercise 2.10: nothing to write, only to read
variants = {
    "one call per parameter": ManualDDP,
    "bucketed, after backward": bucketed,
    "bucketed, overlapped": overlapped,
    "torch DDP": lambda model: lab.torch_ddp(model, PRESET.cap_bytes),
}
compared = lab.compare(variants, PRESET)
compared

# %%
# Exercise 2.10: your two reasons, a sentence each, in quotes; no check reads them
### BEGIN SOLUTION
why_buckets = "As many bytes in fewer calls: a step pays fewer latencies."
why_overlap = "Buckets are in flight while backward computes, so a rank waits less."
### END SOLUTION

# %%
lab.show_calls(compared)

# %%
lab.show_bytes(compared)

# %% [markdown]
# **Notice:** buckets change the number of calls, never the bytes: every gradient goes through one
# all-reduce, 4 bytes for each of Ψ parameters. (The "2Ψ" above counts elements on the link: an
# all-reduce sends its Ψ elements twice.) With one preset, calls and bytes are the same on every
# machine. torch closes a bucket *after* its size has reached the cap, yours closes *before* it would
# exceed the cap, so the counts can differ.

# %%
lab.show_timelines(compared, "bucketed, after backward", "bucketed, overlapped")

# %% [markdown]
# **Notice:** both steps send the same buckets over the same link. After backward they are **exposed**
# (hatched): the rank only waits. Overlapped, the first ones are in flight while backward computes, so
# over all ranks less is exposed. The end stays exposed, because the last bucket cannot leave before
# the last gradient is ready. An all-reduce also waits for the slower rank, so its length varies. Thin
# strips of backward between the bars are your `finish`.

# %%
lab.show_phases(compared)

# %% [markdown]
# **Notice:** compare the hatched parts. One call per parameter pays a latency for each; buckets pay
# few; overlap hides a part of what is left. "communication / computing" counts all communication,
# overlapped or exposed: above 1, some is exposed however well it overlaps. Both pictures show the
# recorded step nearest to the median of the steps below. If it differs from that by over a third,
# nothing is drawn, because it would contradict the throughput.

# %%
lab.show_throughput(compared)

# %% [markdown]
# **Notice:** from one call per parameter to buckets, and from buckets to overlap, throughput grows:
# fewer latencies, then less waiting. Are these your two reasons? With overlap your few lines come
# close to torch's DDP, which does the same in C++. How much each change gains depends on the link:
# with a faster one, all four come closer together. On a busy laptop the last two can change places.

# %% [markdown]
# ## Optional: buckets in the order of the gradients
#
# Your buckets follow the order in which layers are *registered*, from the end. But a model may
# register its layers in any order. Below, `overlapped` trains one small model twice: each bucket
# waits for those before it, so one late bucket at the front keeps all others back.

# %%
lab.show_starts(overlapped)

# %% [markdown]
# torch's DDP learns the order: in the first backward it notes when each gradient becomes ready,
# rank 0 broadcasts its list, and all ranks cut new buckets by it. Without `find_unused_parameters`,
# that first backward has a single bucket with all gradients, so in step 1 nothing overlaps. Later,
# with torch's default cap, the first bucket closes at 1 MiB already, and so leaves early; the others
# close at 25 MiB. With a cap of your own, all have yours.

# %% [markdown]
# Build this now without `lab.Wrapper` and `lab.BucketedWrapper`; your functions of 2.2, 2.5 and 2.6
# may stay. To notice the end of backward, torch's DDP uses a private callback of autograd's engine:
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


weight = torch.nn.Parameter(torch.ones(2))
weight.register_post_accumulate_grad_hook(hook)
weight.sum().backward()

# %% [markdown]
# ### Exercise 2.11 · Buckets in the order of the gradients
#
# *Difficulty 5 of 5 · 45 minutes · target: in both rows of the table all buckets but one, from step 2*
#
# The names are a proposal; the check only calls `ReadyOrderDDP(module, cap_bytes)`. Ranks may get
# their gradients ready in different orders, and rank 0 may not use some parameter in the first step.
# Both must still give one order for all.

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
# Idea: it is exercise 2.7 with a list in place of the set, because a list keeps the order, and with
# one step more at the end of the first backward.
#
# Outline: the first gradient of each backward queues the callback. The callback starts the buckets
# that are left and finishes all. Only then, and only once, agree on the order and cut new buckets;
# `make_buckets` goes through its list from the end. Tensors cannot be broadcast as parameters, but
# their numbers in `module.parameters()` can: these are the same on all ranks. A parameter that rank 0
# did not use needs a place, too. Forget what belonged to this backward.
#
# </details>

# %%
lab.show_starts(ReadyOrderDDP)

# %% [markdown]
# **Notice:** compare the lower row with the one above the exercise. Step 1 is as before, since the
# order is only being learned. From step 2 on it does not matter any more how a model registers its
# layers. The order is agreed on once: in a later step with another order, some buckets leave later,
# but the numbers stay right.

# %% [markdown]
# ## A script of your own
#
# The module that everybody uses is `torch.nn.parallel.DistributedDataParallel`. Around it stands what
# `launch` has done for you so far: `torchrun` starts the same file once for each rank, and says in
# environment variables who is who. So a job is a file, and needs nothing of this workbook.

# %% [markdown]
# | In your file | is |
# |:--|:--|
# | `dist.init_process_group(backend)` | joins: `None` means NCCL for GPUs' tensors and gloo for CPUs' |
# | `os.environ["LOCAL_RANK"]`, `["LOCAL_WORLD_SIZE"]` | this rank among those of its machine, and their number |
# | `DistributedSampler(data, seed=…)` | a rank's part of the indices, in another order after `set_epoch(epoch)` |
# | `DataLoader(data, batch_size=…, sampler=…)` | the rank's batches |
# | `DistributedDataParallel(model)` | all of this notebook; the model itself is its attribute `module` |

# %% [markdown]
# ### Exercise 2.12 · `ddp.py`
#
# *Difficulty 3 of 5 · 25 minutes · target: gradients and parameters as one process has them, on 2 and 3
# ranks; a file that a GPT-2 without DDP can load*
#
# The next cell writes the file `ddp.py`. Fill in its two gaps. The loss is the cross entropy of each
# place's logits with the token after it. Rank 0 prints a line for each epoch, and at the end saves the
# model's state dict with `torch.save` to `options.checkpoint`.

# %%
lab.write_script("ddp.py")

# %% [markdown]
# <details><summary>Hint</summary>
#
# First gap: NCCL wants a GPU for each rank. Are there fewer (`torch.accelerator.device_count()`) than
# ranks on this machine, gloo works. With GPUs, `torch.accelerator.set_device_index` chooses one.
#
# Second gap: sampler, loader, wrapper, optimizer; then two loops. What must change from epoch to epoch?
# Which ranks may print, and which writes? And whose state dict has the names of a GPT-2: the wrapper's,
# or the model's?
#
# </details>

# %%
lab.check_ddp("ddp.py")

# %% [markdown]
# The check runs your file on ranks that it forks. In a terminal you would type the line that the next
# cell prints; `lab.torchrun` types it for you.

# %%
lab.torchrun("ddp.py", "--epochs", 2, ranks=2)

# %% [markdown]
# **Notice:** two processes, one line for each epoch, one file. Whoever loads it needs no process group.
# The printed loss is rank 0's last batch; notebook 06 reports the mean over all ranks.

# %% [markdown]
# ## I can …
#
# - write a training script with DistributedDataParallel, and start it with torchrun
# - derive the weights for shards of unequal size
# - name three kinds of state that must be broadcast
# - weight unequal micro-batches, and synchronize them once
# - explain why every rank must start its buckets in the same order
# - find the exposed communication in a timeline

# %% [markdown]
# ## How it usually goes wrong
#
# - **A sum where a mean was meant**: it trains, with gradients N times too large.
# - **Buffers forgotten**: the copies agree in every parameter, and still compute different losses.
# - **A parameter unused on one rank**: the others wait for it in an all-reduce.
# - **The last, half-full bucket forgotten**: the first layers train on their own shard.
# - **Waiting right after starting**: correct, and nothing overlaps.
# - **Unequal parts averaged plainly**: it trains, on another loss.

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
# Notebook **03 ZeRO stages**: every rank still holds all parameters, gradients and optimizer
# state. Must it?
