# %% [markdown]
# # 02 · Manual DDP
#
# **90 minutes** · any machine with 2 cores, no GPU
#
# Distributed data parallelism (DDP) keeps a whole model on every rank and gives each rank its own
# share of the batch. One averaging per step makes N copies behave like one model. You build it three
# times: one call per parameter, in buckets, and overlapped with backward; then you compare its
# speed with torch's.
#
# *On a rented 8×A100 node: 2 minutes of compute, about $0.74.*

# %% [markdown]
# ## You will be able to
#
# - say why averaging gradients is right, and when it needs weights;
# - build a module that trains on N ranks exactly as one process would;
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
# ## Why averaging is right
#
# The loss of a batch $B$ is a mean over its examples, and so is its gradient. Cut $B$ into shards
# $B_i$, and the mean of $B$ is the weighted mean of the shards' means:
#
# $$\nabla L(B) = \sum_i \frac{|B_i|}{|B|}\, \nabla L(B_i)$$
#
# With equal shards all weights are 1/N: the plain average. With unequal ones it is not.

# %%
# Exercise 2.1: the full batch's gradient from the gradients of its shards
def combine(gradients, sizes):
    """gradients[i]: gradient of the mean loss of shard i, which has sizes[i] examples."""
    ### BEGIN SOLUTION
    total = sum(sizes)
    return sum(gradient * (size / total) for gradient, size in zip(gradients, sizes))
    ### END SOLUTION


lab.check_combine(combine)

# %%
lab.show_combine(combine)

# %% [markdown]
# **Notice:** for shards of 1, 1 and 10 examples the plain mean is another gradient. A training with
# it would run, in the wrong direction, and no error would tell you.

# %% [markdown]
# ## One initial state for all
#
# Equal gradients keep the copies equal only if the copies begin equal. Here every rank builds its
# model with a seed of its own, as a script does that sets none. So rank 0's state must reach every
# rank: parameters, frozen ones too, *and buffers*, for example a BatchNorm's running mean.
#
# `.detach()` gives a tensor that has the same memory and that autograd does not record: write into
# that one.

# %%
# Exercise 2.2: every rank gets rank 0's state
def broadcast_state(model):
    """Writes rank 0's parameters and buffers into the model of every rank."""
    ### BEGIN SOLUTION
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), src=0)
    ### END SOLUTION


lab.check_broadcast_state(broadcast_state)

# %% [markdown]
# ## Average the gradients
#
# After backward each rank holds the gradient of its own shard. One all-reduce per parameter and a
# division turn it into the full batch's.
#
# A trap: a parameter that a rank did not use has `grad` None there. All ranks must call the same
# collectives, so this rank takes part with zeros. Frozen parameters stay out.
#
# The checks compare with the **reference**: a twin of the model that a single process trains on the
# whole batch.

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
# **hook** is a function that autograd calls: after
# `parameter.register_post_accumulate_grad_hook(f)` it calls `f(parameter)` whenever the gradient of
# that parameter is complete. `f` gets the *parameter*, and must return None.
#
# In `__init__`, give all ranks the same state and register a hook on every trainable parameter.
# This first version needs every rank to use every parameter; exercise 2.7 removes that limit.

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
# One call per parameter is many small calls, and each call has a fixed cost. So gradients are sent
# together, in **buckets** of a few megabytes. Backward reaches the last layer first, so a bucket
# that begins at the end of the model is complete early. A bucket becomes one flat tensor, so all
# its parameters have one dtype.

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

# %%
lab.check_make_buckets(make_buckets)

# %% [markdown]
# The preset, printed at the top, says how large a bucket may be. GPT-2 has about 0.8 MB of
# gradients in each block of width 128. How many all-reduces will a step take? Guess, then look.

# %%
# A guess, for exercise 2.5
### BEGIN SOLUTION
my_guess = 6
### END SOLUTION
labs.guess("2.5", "all-reduces per step, in buckets", my_guess)

# %%
lab.explore_buckets(make_buckets, PRESET)

# %% [markdown]
# **Notice:** move the cap: a small one lets the first bucket leave early, a large one means fewer
# calls. The last bucket holds what is left.

# %% [markdown]
# ## One bucket is reduced
#
# `start` copies a bucket's gradients into one flat tensor and begins its all-reduce;
# `async_op=True` returns a handle at once, while gloo or NCCL goes on working. `finish` calls
# `handle.wait()`, and only then divides and gives each parameter its piece. In place of a gradient
# that is None, zeros are sent.

# %%
# Exercise 2.6: one all-reduce for a whole bucket
def start(bucket):
    """Begins the all-reduce of the bucket's gradients; returns (flat, handle)."""
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


lab.check_bucket(start, finish)

# %% [markdown]
# `lab.BucketedWrapper` holds `self.buckets` and calls `self.backward_done()` at the end of every
# backward. Here is the simplest use of your two functions: everything is sent after backward, so
# nothing overlaps.

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
# A bucket can leave as soon as its last gradient is ready, while backward computes the layers
# below. `lab.BucketedWrapper` also calls `self.gradient_ready(parameter)` for each gradient.
#
# All ranks must start the buckets in the *same order*, even if one rank did not use some
# parameter: bucket i leaves only after bucket i-1. A bucket that never becomes complete leaves in
# `backward_done`.
#
# `parameter in bucket` would compare values; ask a set: `self.ready.issuperset(bucket)`.

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
# The check compares numbers on 2, 3 and 4 ranks, also when only rank 0 uses a layer. It also looks
# at the *order of events*: an all-reduce must be issued before the last gradient is ready, and
# until then nothing may wait.

# %%
def overlapped(model, cap_bytes=PRESET.cap_bytes):
    broadcast_state(model)
    return OverlappedDDP(model, make_buckets(model.parameters(), cap_bytes))


lab.check_overlap(overlapped)

# %%
lab.show_in_flight(overlapped, PRESET)

# %% [markdown]
# **Notice:** the first bucket is in flight long before backward ends. The last bucket cannot leave
# before: it holds the embeddings, whose gradients are ready only at the very end. GPT-2's head is
# **tied** to the embeddings: one weight, used first and last, with one gradient, which is complete
# when both uses have added to it.

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
# A large batch can be split into micro-batches whose gradients add up before one step. Averaging
# after each micro-batch would be waste. Inside `with module.no_sync():` backward only accumulates;
# the next backward outside averages the sum. `lab.BucketedWrapper` calls none of your methods while
# `self.synchronize` is False.
#
# `@contextlib.contextmanager`: what stands before `yield` runs on entering the block, what
# stands after it on leaving.

# %%
# Exercise 2.8: no_sync
class AccumulatingDDP(OverlappedDDP):
    @contextlib.contextmanager
    def no_sync(self):
        """Inside the block, backward accumulates and communicates nothing."""
        ### BEGIN SOLUTION
        self.synchronize = False
        try:
            yield
        finally:
            self.synchronize = True
        ### END SOLUTION

# %%
def accumulating(model, cap_bytes=PRESET.cap_bytes):
    broadcast_state(model)
    return AccumulatingDDP(model, make_buckets(model.parameters(), cap_bytes))


lab.check_no_sync(accumulating)

# %% [markdown]
# Micro-batches of unequal size need weights, as in exercise 2.1: `module(**part).loss` is a mean
# over the examples of that part only. Each rank gets its own list; the sizes are the same on all.

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


lab.check_accumulate(accumulate, accumulating)

# %% [markdown]
# ## Measured
#
# Four modules train the same GPT-2 on the same data, taking turns. First your guess: the
# throughput of your overlapped module, as a share of torch DDP's, for example 0.8.

# %%
# A guess, for exercise 2.10
### BEGIN SOLUTION
my_guess = 0.9
### END SOLUTION
labs.guess("2.10", "overlapped, as a share of torch DDP's throughput", my_guess)

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
lab.show_calls(compared)

# %%
lab.show_bytes(compared)

# %% [markdown]
# **Notice:** buckets change the number of calls, never the bytes: every gradient is sent once, 4
# bytes for each parameter. For this model both charts would be the same on GPUs. torch closes a
# bucket after its size has reached the cap, yours closes before that, so the counts can differ.

# %%
lab.show_timelines(compared, "bucketed, after backward", "bucketed, overlapped")

# %% [markdown]
# **Notice:** overlap does not shorten communication. Here communication even takes longer, because
# gloo's threads share the cores with backward; an all-reduce also includes the time in which it
# waits for the slower rank. What counts is the **exposed** part, in red: there a rank only waits.

# %%
lab.show_phases(compared)

# %% [markdown]
# **Notice:** "communication / computing" counts all communication, overlapped or exposed. With a
# ratio above 1, some communication is exposed however well it overlaps. This is one recorded step,
# and on a shared CPU steps differ; trust the throughput below, which is a median of turns.

# %%
lab.show_throughput(compared)

# %% [markdown]
# **Notice:** your few lines come close to torch's DDP. On two CPU cores the order of the last three
# may change from run to run. A GPU computes so much faster that the same exposed communication
# would be a far larger share of the step: seconds on a CPU cannot show that.

# %% [markdown]
# ## I can …
#
# - [ ] derive the weights for shards of unequal size
# - [ ] name three kinds of state that must be broadcast
# - [ ] explain why every rank must start its buckets in the same order
# - [ ] find the exposed communication in a timeline

# %% [markdown]
# ## How it usually goes wrong
#
# - **A sum where a mean was meant**: it trains, with gradients N times too large.
# - **Buffers forgotten**: the copies agree in every parameter, and still compute different losses.
# - **A parameter unused on one rank**: the others wait for it in an all-reduce.
# - **The last, half-full bucket forgotten**: the first layers train on their own shard.
# - **Waiting right after starting**: correct, and nothing overlaps.

# %% [markdown]
# ## What to read
#
# - S. Li et al., [PyTorch Distributed](https://arxiv.org/abs/2006.15704), VLDB 2020, section 3.2.
#   *Why is the first bucket of torch's DDP smaller than the others?*
# - [DistributedDataParallel](https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html),
#   `find_unused_parameters`. *What does it cost, and what does your module do instead?*
# - P. Goyal et al., [Accurate, Large Minibatch SGD](https://arxiv.org/abs/1706.02677), 2017,
#   section 3. *Which mistakes in averaging do they warn of?*

# %% [markdown]
# ## What comes next
#
# Notebook **03 ZeRO stages**: every rank still holds all parameters, gradients and optimizer
# state. Must it?
