# %% [markdown]
# # 06 · Scaling
#
# | In short | This notebook |
# |:--|:--|
# | **Time** | 240 minutes in three sittings (85 + 100 + 55), 105 more for optional parts |
# | **Needs** | any machine with 2 cores; Linux for the two hosts; no GPU |
#
# Here you write a training script and run it on two hosts with a real link between them. You measure what
# limits it, prove which strategy a library really ran, and predict jobs on 16 GPUs that others measured.

# %% [markdown]
# <details><summary>On one GPU</summary>
#
# The ranks of a measurement share the GPU and communicate through gloo. A measured efficiency then
# describes two programs that compete for one GPU. On a node every rank has its own GPU. The two hosts
# always compute on the CPU, because only the link between them is measured.
#
# </details>

# %% [markdown]
# ## You will be able to
#
# - write a training script that `torchrun`, `accelerate launch` and Slurm start unchanged;
# - normalize the loss of uneven batches so that every token counts once;
# - tell a speed-up from an efficiency, in weak and in strong scaling;
# - attribute the scaling overhead of N ranks to its causes.

# %%
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import labs
import labs.scaling as lab

labs.warm_up()

# %% [markdown]
# ## Launching a script with torchrun
#
# `launch` exists only in this workbook. On 8 hosts with 8 GPUs each, a training job is a *script* that
# 64 processes run. On each host `torchrun` starts 8 processes, and it gives each one its rank through
# environment variables. A script needs nothing else from its launcher, so every launcher that sets
# these variables can start it.
#
# `lab.torchrun(script, *options, ranks=2)` runs the command for you and shows its output.

# %%
with open("who.py", "w") as file:
    file.write("""\
import os
import sys

found = (f"{name}={os.environ[name]}" for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
sys.stdout.write(" ".join(found) + "\\n")  # one write per rank: the ranks share this output
""")
lab.torchrun("who.py", ranks=2)

# %% [markdown]
# | Variable | Meaning |
# |:--|:--|
# | `RANK`, `WORLD_SIZE` | the number of this process among all hosts' processes; how many there are |
# | `LOCAL_RANK`, `LOCAL_WORLD_SIZE` | the same within this host: `LOCAL_RANK` selects the GPU |
# | `MASTER_ADDR`, `MASTER_PORT` | the address at which all processes meet, the **rendezvous** |
#
# `dist.init_process_group()` without arguments reads them, apart from the second row: your script
# selects the GPU.

# %% [markdown]
# ## Distributed sampling
#
# All 64 processes run the same script. With equal seeds and no distributed sampler, all train on the
# same samples: the loss falls, but 63 GPUs do nothing useful. Three calls give ranks their shares:
#
# | Call | Effect |
# |:--|:--|
# | `DistributedSampler(windows, seed=s)` | selects this rank's part of one shuffled order; repeats a few samples if N does not divide their number |
# | `DataLoader(windows, batch, sampler=sampler)` | makes batches of these samples |
# | `sampler.set_epoch(number)` | reshuffles: the order depends on the seed and on this number |

# %% [markdown]
# Guess before you write the script: there are 64 samples, each of 2 ranks trains on batches of 4, for 2
# epochs. How many optimizer steps does each rank take?

# %%
# A guess, for exercise 6.1
### BEGIN SOLUTION
my_guess = 16
### END SOLUTION
labs.guess("6.1", "optimizer steps of a rank", my_guess)

# %% [markdown]
# ### Exercise 6.1 · A distributed training script, `train.py`
#
# *Difficulty 3 of 5 · 25 minutes · target: on 2 and 3 ranks, each sample once per epoch, apart from
# the sampler's padding; losses and parameters equal to those of one process*
#
# The next cell writes the file `train.py`. Fill in its three gaps. `models.blocks(model)` is the list
# of the transformer blocks. With FSDP each block is a unit, and the model is the root unit.

# %% [markdown]
# `module(input_ids=windows, labels=windows).loss` is the mean loss; the model shifts the labels.
# `train` returns one dictionary for each step (count every token of the windows, also those without a
# loss):
#
# | Key | Value |
# |:--|:--|
# | "loss", "tokens" | the mean loss and the number of tokens over *all* ranks in this step |
# | "learning_rate" | the learning rate that this step used |
# | "seconds" | the time since the previous step |

# %%
lab.write_script("train.py")

# %%
lab.check_train("train.py")

# %% [markdown]
# <details><summary>Hint</summary>
#
# First gap: create the sampler, the loader, then one wrapper. With FSDP, shard the blocks before the
# model.
#
# Second gap: the usual training loop, inside a loop over epochs. For the reported loss, each rank has a
# mean and a number of samples. What must you sum over the ranks so that one division at the end is
# right? The scheduler's `total_iters` is the number of *steps*, so how often do you step the scheduler?
#
# Third gap: which ranks reach it, and how many of them may open the file?
#
# </details>

# %%
trained = lab.torchrun("train.py", "--samples", 64, "--batch", 4, "--epochs", 2, ranks=2)
trained

# %%
lab.show_metrics(trained)

# %% [markdown]
# **Notice:** two processes ran, but one line was printed and one file was written.
#
# Each step counts the tokens of both ranks. The learning rate falls by the same amount in each step. A
# scheduler that steps twice per optimizer step would reach zero after half of the steps. Later you
# start this file unchanged on two hosts.

# %% [markdown]
# ## Loss normalization with uneven token counts
#
# In supervised fine-tuning, only the *answer* tokens count in the loss; the tokens of prompts and padding
# have the label -100. Let rank 0 have answers of 2 tokens and rank 1 answers of 30. If you average the
# two ranks' mean losses, a token on rank 0 weighs 15 times as much as a token on rank 1.

# %% [markdown]
# The default of transformers was such a mean of means, in two places:
#
# | Mean of means | Default until | Fixed by |
# |---|---|---|
# | over micro-batches | October 2024 | pull request *[34191](https://github.com/huggingface/transformers/pull/34191)* |
# | over ranks | July 2025 | an option, off by default, of October 2024 (*[34373](https://github.com/huggingface/transformers/pull/34373)*); on by default since *[39395](https://github.com/huggingface/transformers/pull/39395)* |

# %%
batch = lab.answers([2, 5])  # two answers, of 2 and 5 tokens, each after a prompt of 8
print(batch["labels"])
print((batch["labels"] != -100).sum(), "answer tokens")

# %% [markdown]
# The count is an int64 tensor without dimensions, so it can be all-reduced. `lab.loss_sum(module, batch)`
# returns the *sum* of the losses of the answer tokens, with a graph for backward; 0 if there are none.
#
# Guess: rank 0 has answers of 2 tokens, rank 1 answers of 30. What is the relative error of the
# gradient, in percent, if you average the ranks' mean losses?

# %%
# A guess, for exercise 6.2
### BEGIN SOLUTION
my_guess = 30
### END SOLUTION
labs.guess("6.2", "relative error of the gradient of the mean of means, %", my_guess)

# %% [markdown]
# ### Exercise 6.2 · Token-weighted loss
#
# *Difficulty 3 of 5 · 15 minutes · target: gradients and loss of the mean over all answer tokens, on 2,
# 3 and 4 ranks, also if a rank has none*
#
# `module` is wrapped in DDP, so each `backward` adds the *mean over the ranks* of their gradients. A rank
# runs several micro-batches for one optimizer step. The caller takes that step.

# %%
# Exercise 6.2: forward and backward of all micro-batches of one step
def ragged_step(module, micro_batches):
    """Leaves the gradients in place; returns the mean loss over the answer tokens of all ranks."""
    ### BEGIN SOLUTION
    tokens = sum((batch["labels"] != -100).sum() for batch in micro_batches)
    dist.all_reduce(tokens)
    total = 0
    for batch in micro_batches:
        loss = lab.loss_sum(module, batch) / tokens
        (dist.get_world_size() * loss).backward()
        total += loss.detach()
    dist.all_reduce(total)
    return total
    ### END SOLUTION


# %%
lab.check_ragged_step(ragged_step)

# %% [markdown]
# <details><summary>Hint</summary>
#
# The denominator is one number for all ranks and all micro-batches, so you need it before the first
# backward. How many all-reduces does that take?
#
# Then write down what DDP does to your gradients: it sums them over the ranks and divides once by N. By
# what must each rank multiply its loss, so that only your denominator remains?
#
# A rank without answer tokens must still run forward and backward, because the other ranks wait in the
# all-reduce of its gradients.
#
# </details>

# %%
lab.show_ragged(ragged_step)

# %% [markdown]
# **Notice:** with answers of equal length the mean of means is right.
#
# So a test with equal lengths does not catch this bug. The more uneven the lengths are, the larger the
# error of the gradient becomes. Your gradient has no error.

# %% [markdown]
# ## Scaling efficiency
#
# A job takes 100 hours on one GPU. On two GPUs it runs 1.6 times as fast: it ends after 62.5 hours,
# but you pay for 125 GPU-hours. Where did 25 hours go? On 1,024 GPUs, the same efficiency wastes 205 GPUs.
# So measure this overhead, and attribute it to its causes.

# %% [markdown]
# **Speed-up** is the throughput of N ranks divided by that of one rank. **Efficiency** is the speed-up
# divided by N.
#
# In **weak scaling** the per-rank batch size stays fixed, so N ranks do N times the work per step. In
# **strong scaling** the global batch size stays fixed: each rank computes 1/N of it, but its gradients are
# as large as before.

# %% [markdown]
# On a CPU the lab's ranks use the slow link of notebook 05: sending all gradients takes half as long as
# a step of one rank. Guess: how efficient is weak scaling, with one rank on each core, or on each GPU?

# %%
# A guess, in percent, drawn in the next chart (exercise 6.3, optional, defines efficiency in code)
### BEGIN SOLUTION
my_guess = 80
### END SOLUTION
labs.guess("6.3", "efficiency of weak scaling, in percent", my_guess)

# %% [markdown]
# The next cell trains a GPT-2 with DDP on 1 rank, on 2, and so on, in turns (10 to 30 s). On a CPU each
# rank computes with one thread. The largest number of ranks is twice the number of cores, so that two
# ranks share each core.

# %%
lab.show_scaling()

# %% [markdown]
# **Notice:** strong scaling loses more than weak scaling.
#
# In strong scaling the bytes stay the same, while the compute that could hide them shrinks. On a slow
# link more ranks can even be slower than one. If two ranks share a core (grey), compute takes twice as
# long: they gain only what one computes while the other waits. An efficiency therefore needs three
# more facts: the number of ranks, weak or strong scaling, and the throughput of one rank.

# %% [markdown]
# ## Scaling overhead
#
# An efficiency does not say what to fix. Four causes can lower it, and each one needs another fix.

# %% [markdown]
# The next cell records one rank alone, then all ranks with the same work each (10 to 40 s).
# There are five runs: healthy, without the link of notebook 05; on a slow link; with a slow last rank;
# with a slow data loader; and with slow compute on all ranks, as on GPUs that throttle. Which part of the
# step grows in which run?

# %%
runs = lab.record_lost_time()
runs

# %% [markdown]
# On GPUs the slow link is the real one, with each bucket sent many times.
#
# `runs` is a dictionary: `runs["slow rank"]` is a list with one trace per rank, and `runs.alone` is a list
# with one trace. All times of a run share *one time axis*, so you may compare them across ranks. Every
# rank issues the same collectives in the same order.

# %%
for trace in runs["slow rank"]:
    first = trace.collectives[0]
    print(f"rank {trace.rank}: begins at {first.begin:.4f} s, ends at {first.end:.4f} s")

# %% [markdown]
# Assign every instant of a rank's step to exactly one category. If several apply, the first one in this
# list wins:
#
# 1. *computing*: an interval of `trace.compute`;
# 2. *data loading*: a span of torch's data loader;
# 3. *communication*: this rank is inside a collective that all ranks have entered;
# 4. *waiting*: this rank is inside a collective that some other rank has not entered yet.
#
# All other instants count as *computing*. Overlapped communication costs no time, because computing
# comes first.

# %% [markdown]
# | Expression | Value |
# |:--|:--|
# | `trace.collectives` | a tuple of collectives with `begin` and `end`, in the order of their calls |
# | `trace.compute` | disjoint intervals `(begin, end)` |
# | `trace.labelled("enumerate(DataLoader)")` | a list of spans with `begin` and `end`; empty if there is no data loader |
# | `trace.seconds`, `trace.steps` | the seconds of all recorded steps together; a list of the steps |
# | `lab.union(spans)` | the disjoint intervals that are covered by collectives, spans or intervals |
# | `lab.subtract(intervals, others)` | the parts of `intervals` that `others` do not cover |
# | `lab.total_seconds(intervals)` | their total length |

# %% [markdown]
# ### Exercise 6.4 · Attribute the scaling overhead
#
# *Difficulty 4 of 5 · 30 minutes · target: on 19 synthetic runs and 2 recorded ones, parts that add up
# to the step and to its overhead*
#
# The exercise has two cells; the check stands below the second one. First compute the parts of a rank's
# step. The k-th collective of one rank is the k-th collective of every rank.

# %%
# Exercise 6.4: the seconds of each part, in one step of a rank
def parts_of_step(run, rank):
    """{"communication": seconds, "waiting": ..., "data loading": ..., "computing": ...}, the mean
    over the recorded steps of run[rank]; their sum is the seconds of a step."""
    ### BEGIN SOLUTION
    trace = run[rank]
    last = [max(one.begin for one in same) for same in zip(*(each.collectives for each in run))]
    moving = lab.union((begin, one.end) for begin, one in zip(last, trace.collectives))
    waiting = lab.subtract(lab.union(trace.collectives), moving)
    loading = lab.union(trace.labelled("enumerate(DataLoader)"))
    busy = lab.union([*loading, *trace.compute])
    seconds = {"communication": lab.total_seconds(lab.subtract(moving, busy)),
               "waiting": lab.total_seconds(lab.subtract(waiting, busy)),
               "data loading": lab.total_seconds(lab.subtract(loading, trace.compute))}
    seconds["computing"] = trace.seconds - sum(seconds.values())
    return {part: seconds[part] / len(trace.steps) for part in seconds}
    ### END SOLUTION

# %% [markdown]
# The scaling overhead is a step of `run` minus a step of `alone`, part by part. But which rank's step? The
# delay of a slow rank is *waiting* on the other ranks; on the slow rank itself it looks like computing.
# So take all parts from *the rank that waits longest*. A part may be negative: a rank of `run` may do it
# faster than the rank that runs alone.

# %%
# Exercise 6.4, second half: the overhead of a step, compared with one rank alone
def attribute_overhead(run, alone):
    """The same four keys; the sum is the step of the rank that waits longest, minus `alone`'s."""
    ### BEGIN SOLUTION
    parts = [parts_of_step(run, rank) for rank in range(len(run))]
    waits_most = max(parts, key=lambda part: part["waiting"])
    single = parts_of_step(alone, 0)
    return {part: waits_most[part] - single[part] for part in single}
    ### END SOLUTION

# %%
lab.check_attribute_overhead(parts_of_step, attribute_overhead)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Work with intervals until the end, and convert them to seconds only then. For each collective you need
# a time that no single trace has: when the last rank entered it. `zip` over the ranks' collectives
# gives it. From then on data is being transferred; before that, this rank only waits. That makes two
# lists of intervals; the data loader's spans are the third. Subtract from each list everything that
# has priority over it. Computing is the rest of the step.
#
# </details>

# %%
lab.show_lost_time(runs, attribute_overhead)

# %% [markdown]
# **Notice:** the longest bar of each slow run names its cause.
#
# So it says what to fix: the link, one rank, the data loader, or the compute of all ranks. The step time
# alone cannot tell these four apart. If `healthy` loses time to slower computing, the cause is
# *contention*: the ranks share caches, memory bandwidth and power that one rank had for itself.

# %% [markdown]
# Why may you compare traces of several processes? The profiler reads the clock of the host, and all
# ranks here use the same clock. Clocks of different hosts differ by milliseconds, which is longer than many
# collectives. Across hosts, first align the traces at the end of the same barrier, because no rank leaves
# a barrier before the last rank has entered it.

# %% [markdown]
# ## Second sitting · 100 minutes
#
# | In short | This sitting |
# |:--|:--|
# | **Core** | 6.6, 6.7, 6.8, 6.9, 6.11 |
# | **Optional** | 6.3, 6.5, 6.12, 6.14, 6.15 |
# | **In a new kernel** | run the cell of the imports; `train.py` is still there |
#
# You will be able to:
#
# - predict and count the bytes that a strategy sends between hosts, and choose a strategy for a cluster;
# - compute MFU and HFU of a run;
# - prove from traffic and memory which strategy a library really ran.

# %% [markdown]
# ## Training on two hosts
#
# Inside a host, H100s communicate at 450 GB/s in each direction. In a training cluster each H100 has a
# network card of 400 Gbit/s, or 50 GB/s (*[Llama 3](https://arxiv.org/abs/2407.21783)*, section 3.3.1),
# so the eight cards of a host carry 400 GB/s. On a small cloud all GPUs of a host share one card, often of
# 10 Gbit/s, or 1.25 GB/s. How many bytes does your job send over that link, and how long does that take?

# %% [markdown]
# The lab splits this machine into two hosts. Each host has its own address, host name and processes, and
# one link with a set bandwidth. This is the slow case, in which the link is the bottleneck.

# %% [markdown]
# This needs Linux, but not root. A machine that cannot create hosts (macOS, a locked container) says why
# and shows a recorded run instead.
#
# Your `train.py` starts unchanged on both hosts, by `torchrun --nnodes 2`, with two ranks on each. The
# hosts find each other by rendezvous: the first host opens a port, and the other one connects to it.
# The links carry 200 Mbit/s here; other cells set other bandwidths.

# %%
lab.show_two_hosts("train.py", "--epochs", "1", "--metrics", "two_hosts.json")

# %% [markdown]
# Only rank 0, on host 0, prints. The bytes come from the kernel's counters of each host's link. Almost
# all of them are gradients: in each of 4 steps a host sends 1.5 times 0.5 MB, as the next section
# derives. Host 0 sends 1 MB more, because before the first step DDP sends rank 0's parameters, 0.5 MB,
# to each of the two ranks on host 1.

# %% [markdown]
# ## Ring all-reduce between hosts
#
# In a ring over all N ranks, each rank sends 2(N-1)/N · S bytes for an all-reduce of S bytes, all of them
# to the next rank. Ranks are numbered host by host, so only the last rank of a host has its next rank
# on another host.
#
# Guess: four ranks on two hosts all-reduce 4 MB. How many MB does a host send over its link?

# %%
# A guess, in MB, drawn in the next chart (exercise 6.5, optional, computes these bytes)
### BEGIN SOLUTION
my_guess = 4
### END SOLUTION
labs.guess("6.5", "MB that a host sends over its link in an all-reduce of 4 MB", my_guess)

# %% [markdown]
# The next cell measures with one start of torchrun. It counts the bytes of three kinds of collectives. For
# an optional exercise it also times all-reduces of several sizes on links of 25, 50 and 100 Mbit/s.

# %%
lab.show_link_bytes()

# %% [markdown]
# **Notice:** the reduce-scatter sends twice its formula, as much as an all-reduce.
#
# gloo implements a reduce-scatter as an all-reduce and discards the shards that a rank does not need.
# NCCL has a real one. All-reduce and all-gather are 1 % above their formulas, because of TCP headers. A
# formula holds only for the algorithm that a library implements, so count.

# %% [markdown]
# ## Hierarchical all-reduce
#
# The flat ring sends 1.5 S over the link, but the other host needs only one sum. A **hierarchical
# all-reduce** has three steps: a reduce-scatter inside each host, after which each of its R ranks has the
# host's sum of S/R; an all-reduce of these shards between hosts; an all-gather inside each host.

# %% [markdown]
# NCCL has this built in: *[on two nodes](https://github.com/NVIDIA/nccl-tests/issues/196)* it uses a
# *tree* (or *NVLSTree*), which *[reduces inside the node](https://github.com/NVIDIA/nccl/issues/530)*
# first. On more nodes it chooses by size, bandwidth and latency.
# [`NCCL_ALGO`](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-algo) forces an
# algorithm, such as `Ring`, for a test. torch's gloo uses the flat ring, so here you build a simple
# form of what NCCL does.
#
# Guess: how many MB does a host send now, for 4 MB on two hosts with two ranks each?

# %%
# A guess, for exercise 6.6
### BEGIN SOLUTION
my_guess = 2
### END SOLUTION
labs.guess("6.6", "MB that a host sends in a hierarchical all-reduce of 4 MB", my_guess)

# %% [markdown]
# A 2-D `DeviceMesh` has one row of ranks for each of H hosts:
#
# | Expression | Value |
# |:--|:--|
# | `mesh["inside"]` | the ranks of this rank's host; `.size()` is R |
# | `mesh["across"]` | the ranks with the same local rank on each host |
# | `mesh["inside"].get_group()` | their process group, for `group=` of a collective |
#
# ### Exercise 6.6 · Hierarchical all-reduce
#
# *Difficulty 4 of 5 · 20 minutes · target: the sum in place, for any size; 2(H-1)/H · S/R from each
# rank to other hosts*

# %%
# Exercise 6.6: the sum over all ranks, of which each rank sends only 1/R to other hosts
def hierarchical_all_reduce(tensor, mesh):
    """In place, as dist.all_reduce; R need not divide the number of elements."""
    ### BEGIN SOLUTION
    inside, across = mesh["inside"], mesh["across"]
    flat = tensor.flatten()
    padded = F.pad(flat, (0, -len(flat) % inside.size()))
    piece = padded.new_empty(len(padded) // inside.size())
    dist.reduce_scatter_single(piece, padded, group=inside.get_group())
    dist.all_reduce(piece, group=across.get_group())
    dist.all_gather_single(padded, piece, group=inside.get_group())
    tensor.copy_(padded[:len(flat)].view_as(tensor))
    ### END SOLUTION


# %%
lab.check_hierarchical_all_reduce(hierarchical_all_reduce)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `dist.reduce_scatter_single` and `dist.all_gather_single` take flat tensors: the full tensor must have
# exactly R times as many elements as the shard. So work on a flat copy, padded with zeros to the next
# multiple of R; zeros do not change a sum. After the all-gather, remove the padding and copy the result
# into `tensor`, whatever its shape is.
#
# </details>

# %%
lab.show_hierarchical(hierarchical_all_reduce)

# %% [markdown]
# **Notice:** the link carries S instead of 1.5 S, and the all-reduce is faster on both links.
#
# All bars are longer than their ticks, because the formula leaves out CPU time. The hierarchical ones
# exceed theirs by more: gloo implements the reduce-scatter inside the host as an all-reduce. CPU time
# does not shrink on a faster link. So on a fast enough link, with gloo, the gain is lost.

# %% [markdown]
# On GPUs the ranks of a host communicate over NVLink, and NCCL has a real reduce-scatter. The next table
# applies the ring formula to the 16-bit gradients of 7B parameters on two hosts of 8 H100s: first with a card
# of 400 Gbit/s for each GPU, as in a training cluster, then with one card for all, as on small clouds.

# %%
lab.show_on_gpus()

# %% [markdown]
# **Notice:** with one card per host your three steps win, 334 ms against 525 for the flat ring.
#
# With a card for each GPU the network is almost as fast as NVLink. There your three steps, one after
# another, are *slower* than the flat ring (89 ms against 66). Only a tree that pipelines the pieces is
# faster (54 ms at best).

# %% [markdown]
# ## Hybrid sharding (HSDP)
#
# FSDP over all ranks gathers nearly every parameter twice over the link. **HSDP** (hybrid sharding;
# notebook 04 has a section on it) shards inside each host and replicates across hosts. Then only
# gradients cross the link, and only each rank's shard of them. The cost is memory: a rank stores 1/R of
# the model states instead of 1/N.

# %% [markdown]
# Whether HSDP pays depends on the link. First measure it on a slow one.
#
# Guess: on a slow link on which a step of FSDP takes 1.1 s, how many seconds does a step of HSDP take?

# %%
# A guess, for exercise 6.7
### BEGIN SOLUTION
my_guess = 0.5
### END SOLUTION
labs.guess("6.7", "seconds of a step of HSDP", my_guess)

# %% [markdown]
# | Call | Effect |
# |:--|:--|
# | `init_device_mesh("cpu", (a, b), mesh_dim_names=(...))` | arranges all ranks in `a` rows of `b` consecutive ranks |
# | `fully_shard(module, mesh=mesh)` | on a 2-D mesh: replicates over its first dimension, shards over its second |
# | `model.layers` | an `nn.ModuleList`, the blocks of the model of this exercise |
#
# ### Exercise 6.7 · HSDP
#
# *Difficulty 3 of 5 · 10 minutes · target: Ψ/R resident; all-gathers and reduce-scatters inside the
# host only*

# %%
# Exercise 6.7: each block and the model, sharded inside a host and replicated across hosts
def hybrid_shard(model, hosts):
    """Wraps the model; ranks are numbered host by host, the same number on each of `hosts`."""
    ### BEGIN SOLUTION
    mesh = init_device_mesh("cpu", (hosts, dist.get_world_size() // hosts),
                            mesh_dim_names=("across", "inside"))
    for block in model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    ### END SOLUTION


# %%
lab.check_hybrid_shard(hybrid_shard)

# %% [markdown]
# <details><summary>Hint</summary>
#
# How many ranks does a host have? The mesh has one row for each host, so that consecutive ranks in a row
# are on the same host. With the two dimensions swapped, training gives the same result, but the shards
# of a layer are on different hosts.
#
# </details>

# %% [markdown]
# The next cell trains the same model with DDP, ZeRO-3, FSDP and your HSDP on a link of 50 Mbit/s, in turns.
# The root holds half of this model's parameters. FSDP keeps the root gathered from forward to backward
# (notebook 04); ZeRO-3 gathers it twice.

# %%
lab.show_training(hybrid_shard)

# %% [markdown]
# **Notice:** ordered by seconds or by bytes, the strategies rank the same.
#
# ZeRO-3 sends three times the bytes of HSDP, and its step takes more than twice as long; FSDP saves one
# all-gather of the root. DDP sends 1.5 times the bytes of HSDP, and stores twice its parameters. ZeRO-3 and
# FSDP are above their ticks because of gloo's reduce-scatter. With NCCL, ZeRO-3 would send 2.25 S, still
# more than twice HSDP's S.

# %% [markdown]
# ## Choosing a strategy for a cluster
#
# Model states take 16 bytes for each parameter (2 + 2 + 12, mixed precision). The communicated tensor, S,
# has 2 bytes for each. With H hosts of R GPUs, N = H·R:
#
# | Strategy | States on a GPU | Seconds of a step's collectives |
# |:--|:--|:--|
# | DDP | all | 2(N-1)/N · S over the slowest link |
# | HSDP | 1/R | 3(R-1)/R · S inside, then 2(H-1)/H · S across |
# | FSDP | 1/N | 3(N-1)/N · S over the slowest link |

# %% [markdown]
# A ring is as slow as the slowest link that it uses: `across` if there are several hosts, and `inside` if a
# host has several GPUs. `across` is the bandwidth of all cards of a host together, because NCCL's rings and
# trees *[use them all at once](https://github.com/NVIDIA/nccl/issues/530)*.
#
# ### Exercise 6.8 · The fastest strategy that fits
#
# *Difficulty 3 of 5 · 15 minutes · target: the fastest that fits, in several hundred cases*

# %%
# Exercise 6.8: the fastest strategy whose model states fit
def choose_strategy(parameters, memory, hosts, ranks, inside, across):
    """"DDP", "HSDP", "FSDP", or None where none fits. memory: bytes for states on a GPU; ranks: GPUs
    of a host; inside: bytes per second of a GPU; across: of all cards of a host together."""
    ### BEGIN SOLUTION
    n, size, states = hosts * ranks, 2 * parameters, 16 * parameters
    slowest = min([across] * (hosts > 1) + [inside] * (ranks > 1), default=inside)
    kept = {"DDP": states, "HSDP": states / ranks, "FSDP": states / n}
    seconds = {"DDP": 2 * (n - 1) / n * size / slowest,
               "HSDP": (3 * (ranks - 1) / ranks * size / inside
                        + 2 * (hosts - 1) / hosts * size / across),
               "FSDP": 3 * (n - 1) / n * size / slowest}
    fitting = [name for name in kept if kept[name] <= memory]
    return min(fitting, key=seconds.get, default=None)
    ### END SOLUTION


# %%
lab.check_choose_strategy(choose_strategy)

# %% [markdown]
# <details><summary>Hint</summary>
#
# "The first one that fits" is the usual rule, and often wrong: DDP may fit and still send more over a slow
# link than HSDP. "HSDP between hosts" is another rule, and wrong if the network is fast. So first write
# down the bytes that each strategy stores on a GPU, and its seconds, in two dictionaries with the same keys.
# Then drop the strategies that need more than `memory`, and take the fastest of the others.
#
# </details>

# %%
lab.show_choice(choose_strategy)

# %% [markdown]
# **Notice:** HSDP wins only where the link is slow, and then only if the hosts are few or DDP does not
# fit.

# %% [markdown]
# In a training cluster, with a card for each GPU, the network is almost as fast as NVLink, so the
# strategy with the fewest bytes wins: DDP if it fits, else FSDP. On two hosts with one card each, HSDP sends
# S between hosts, and DDP 1.9 S. On 16 hosts 2(H-1)/H is almost 2(N-1)/N, and that gain is gone.

# %% [markdown]
# 70B parameters do not fit on 2 hosts. On 16 hosts a step's collectives take minutes at 10 Gbit/s.
#
# The rule counts bytes only. A ring over N ranks also has N-1 steps with a latency each, and the switches
# of a large cluster may carry less than all cards together. Both favour HSDP on many hosts; only a
# measurement there can say how much.

# %% [markdown]
# ## MFU and HFU
#
# "Our cluster reaches 200 TFLOP/s per GPU." Is that much? An H100's data sheet says 1,979, so it is a
# tenth. Its dense peak is 989.5, so it is a fifth. If a quarter of the work was recomputation, it is
# less than that. A number of FLOP/s needs three definitions beside it.

# %% [markdown]
# | Term | Definition |
# |:--|:--|
# | **6ND** | 6 FLOPs for each of N parameters (Ψ elsewhere) and D tokens: 2 in forward, 4 in backward |
# | attention | 12·L·h·s more for each token: L layers of width h, sequences of s tokens |
# | **MFU**, model FLOPs utilization | the FLOPs per second that the model needs, divided by the peak |
# | **HFU**, hardware FLOPs utilization | the same, but recomputed FLOPs count too |

# %%
run = lab.reported_run("mosaic-036")
run

# %% [markdown]
# | Attribute | Value |
# |:--|:--|
# | `run.parameters`, `.vocabulary`, `.tied` | the number of parameters; the vocabulary size; whether head and embedding share one matrix |
# | `run.layers`, `.hidden`, `.sequence` | L, h and s |
# | `run.gpus`, `.tokens_per_s` | the number of GPUs; tokens per second of all GPUs together |
# | `run.sheet_tflops`, `.sparse` | the data sheet's TFLOP/s of one GPU; whether this is the rate with sparsity, twice the dense one |

# %% [markdown]
# N counts only parameters that take part in a *matrix product*. The head is a product with `vocabulary
# × hidden` parameters. If the model is `tied`, the embedding is the same matrix. If not, it is a second
# matrix, which is only looked up: leave it out. Norms, biases and positions are too few to matter: keep
# them in. A rate "with sparsity" holds for matrices in which half the elements are zero; yours are
# dense.

# %% [markdown]
# 12·L·h·s counts every pair of tokens, also the masked half. A causal FlashAttention kernel skips almost
# all of that half, so it computes about 6·L·h·s. *[PaLM's MFU](https://arxiv.org/abs/2204.02311)* (appendix
# B) counts all pairs; so do the published runs below, and so do you. Before you compare two MFUs, ask
# which pairs each one counts.

# %% [markdown]
# ### Exercise 6.9 · FLOPs, MFU and HFU
#
# *Difficulty 3 of 5 · 15 minutes · target: the printed MFU of published runs, and the MFU of random runs*
#
# `run.recompute` is `"none"`, `"selective"` (backward recomputes attention's forward) or `"full"`
# (backward recomputes all of forward). Forward takes a third of the FLOPs of forward and backward.

# %%
# Exercise 6.9: FLOPs per token, and the shares of the dense peak
def utilization(run):
    """(6N, FLOPs per token with attention, MFU, HFU); both shares between 0 and 1."""
    ### BEGIN SOLUTION
    looked_up = 0 if run.tied else run.vocabulary * run.hidden
    six_n = 6 * (run.parameters - looked_up)
    attention = 12 * run.layers * run.hidden * run.sequence
    flops = six_n + attention
    again = {"none": 0, "selective": attention / 3, "full": flops / 3}[run.recompute]
    peak = run.sheet_tflops * 1e12 / (2 if run.sparse else 1)
    share = run.tokens_per_s / run.gpus / peak
    return six_n, flops, flops * share, (flops + again) * share
    ### END SOLUTION


# %%
lab.check_utilization(utilization)

# %% [markdown]
# <details><summary>Hint</summary>
#
# A utilization is FLOPs per token × tokens per second of *one* GPU / FLOP/s of one GPU. So first convert
# all three to one token, one GPU and one second.
#
# Outline: (1) 6 × the parameters that take part in a matrix product; (2) add attention's 12·L·h·s; (3) the
# dense peak in FLOP/s; (4) MFU from 2 and 3; (5) HFU: the recomputed FLOPs are a third of attention, a third
# of everything, or zero.
#
# </details>

# %% [markdown]
# What is the MFU of this machine? No data sheet gives a processor's peak, so the lab measures one: a large
# fp32 matrix product on one core, or on one GPU. Then it trains a small GPT-2 on the same device.

# %%
own = lab.own_run()
own

# %%
lab.show_utilization(utilization, own)

# %% [markdown]
# **Notice:** at 32,768 tokens most of the counted FLOPs are attention's.
#
# With 6N alone, the MFU there is less than half of the printed one; without the masked half it is 22 %
# instead of 31 % (H100). A run that recomputes everything may report 54 % (HFU), 40 % (MFU), or 20 % of the
# sparse peak.

# %% [markdown]
# ## FSDP with Accelerate
#
# Qwen2-7B has 7.6 billion parameters: 122 GB with AdamW, so its states must be sharded. A course's last
# exercise says: fine-tune it "with Accelerate and FSDP". That script starts on any machine, and its loss
# falls. But was anything sharded? If not, the script runs out of memory with the model that needs sharding,
# or eight GPUs do the work of one.

# %%
lab.write_script("finetune.py")

# %% [markdown]
# **Accelerate** wraps the objects of your script: `prepare` returns model, optimizer and loader as the
# configuration asks for. `accelerate launch` reads that configuration from a YAML file and starts the
# ranks with torchrun.
#
# The Qwen2 here is small, has random weights, and ties its embedding to its head. `--model Qwen/Qwen2-0.5B`
# loads real weights, if the Hugging Face hub can be reached.

# %%
YAML = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
num_machines: 1
num_processes: 2
mixed_precision: "no"
fsdp_config:
  fsdp_version: 2
"""
with open("accelerate.yaml", "w") as file:
    file.write(YAML)
launched = lab.accelerate("finetune.py")
launched

# %% [markdown]
# Look at the line that the script printed. How often is it there, and which world size does it name? The
# script also wrote a record of each rank's last step: its collectives, and the bytes that were resident
# when backward was done.

# %% [markdown]
# On CPUs, Accelerate joins the ranks into one job only on request, by `Accelerator(cpu=True)`; the script's option is `--cpu`. The
# option `--shard` sets a private variable of Accelerate to FSDP, as Accelerate itself does on GPUs.
#
# The next cell reads the records of this job and runs three more, as torchrun would: `--cpu` on one process,
# `--cpu` on two, `--cpu --shard` on two. Guess: with `--cpu`, how many full copies of the parameters are resident on two ranks together?

# %%
# A guess, for exercise 6.11
### BEGIN SOLUTION
my_guess = 2
### END SOLUTION
labs.guess("6.11", "copies of the parameters on two ranks together, with --cpu", my_guess)

# %%
jobs = lab.finetune_jobs(launched)
jobs

# %% [markdown]
# First you see the records of the job that `accelerate launch` started, then what the library calls each
# job. Your function does not trust these names: it decides by traffic and memory. `ranks` is a list with
# one record per rank:
#
# | Attribute | Value |
# |:--|:--|
# | `rank.resident` | a dictionary with the keys "parameters", "gradients" and "optimizer_state": what is resident on this rank, in full copies |
# | `rank.reduced` | bytes of this rank's `all_reduce`, `reduce_scatter` and `reduce`, in full copies of the gradients |

# %% [markdown]
# | Name | Evidence from all N ranks |
# |:--|:--|
# | "one process" | N is 1 |
# | "separate" | gradients are never reduced: N models, each trained alone |
# | "DDP" | gradients are reduced; N copies of all three parts |
# | "ZeRO-1", "ZeRO-2" | 1 copy of the optimizer state; of the gradients too |
# | "ZeRO-3" | 1 copy of all three. FSDP is ZeRO-3: no measurement tells them apart |
#
# Copies are not exact: shards are padded or uneven, and up to a fifth of the gradients may be missing.

# %% [markdown]
# ### Exercise 6.11 · Identify the strategy
#
# *Difficulty 3 of 5 · 15 minutes · target: the right name for 69 jobs, recorded on real ranks or random,
# on 1 to 16 ranks*

# %%
# Exercise 6.11: the strategy of a job, from its traffic and its memory
def identify_strategy(ranks):
    """One of the six names; ranks: a list with one record per rank."""
    ### BEGIN SOLUTION
    N, sharded = len(ranks), 0
    for part in ("parameters", "gradients", "optimizer_state"):
        copies = sum(rank.resident[part] for rank in ranks)
        sharded += copies < (1 + N) / 2
    if N == 1:
        return "one process"
    if ranks[0].reduced < 0.5:
        return "separate"
    return ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")[sharded]
    ### END SOLUTION


# %%
lab.check_identify_strategy(identify_strategy)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Sum the resident copies over all ranks. The result is near 1 or near N: which number lies between them,
# for every N? Memory says what is sharded. Collectives alone cannot: DeepSpeed's ZeRO-1 all-reduces too.
# But only collectives tell N ranks that train one model from N ranks that train a model each. A loss that
# is averaged for printing is an all-reduce of 4 bytes.
#
# </details>

# %%
lab.show_jobs(jobs, identify_strategy)

# %% [markdown]
# **Notice:** on a CPU the script never used FSDP by itself.
#
# As launched, each rank trains a model of its own. With `--cpu` it is DDP: one all-reduce of all
# gradients, nothing sharded, no warning. Only with `--shard` do the two ranks store one copy together,
# although the library still calls itself MULTI_CPU. On GPUs the job as launched is FSDP.

# %% [markdown]
# ## DeepSpeed
#
# **DeepSpeed** is the library in which ZeRO was first implemented. `deepspeed.initialize(model=...,
# config=...)` returns an *engine*; you call `engine.step()` instead of `optimizer.step()`. The ZeRO stage is
# one number in its configuration, and most other numbers there are bucket sizes.

# %%
lab.show_deepspeed_config(stage=2)

# %% [markdown]
# Accelerate's FSDP is `fully_shard`, so its memory and traffic are those of notebook 04. Notebook 03's
# last picture has DeepSpeed's three stages. By default its stage 1 reduces gradients after backward,
# and then frees those that other ranks own, so its peak is higher than stage 2's. Stages 1 and 2
# all-reduce gradients (2 S) and gather the updated parameters (S), so they send as much as FSDP2.

# %% [markdown]
# Choose by what must fit. Use DDP if 16 bytes for each parameter, its buckets and the activations fit. Else
# use FSDP2, in plain torch or through Accelerate. Use DeepSpeed for features that only it has, such as
# states on NVMe.
#
# Accelerate's launcher also starts scripts that do not import Accelerate: `accelerate launch
# --config_file accelerate.yaml train.py` starts yours unchanged, because your script joins the process group through the environment variables that
# every launcher sets.

# %% [markdown]
# ## Third sitting · 55 minutes
#
# | In short | This sitting |
# |:--|:--|
# | **Core** | 6.16, 6.17, 6.18 |
# | **In a new kernel** | run the cell of the imports |
#
# You will be able to:
#
# - predict the seconds of a step from kernels, host and network, and say when it is launch-bound;
# - correct a prediction by two steps that you measured;
# - choose the fastest plan before any of them runs.

# %% [markdown]
# ## What will my job take?
#
# Before you rent 16 GPUs, you want two numbers: the memory of a rank, and the seconds of a step. This
# workbook predicts both. Is it right? Over two thousand runs on up to 512 GPUs are public, of
# nanotron, Megatron-LM and prime-rl. Their rows lie in `labs/predictions/gpu_runs/rows`, with their
# sources. First, jobs that ran on two kinds of GPU:

# %%
lab.show_cards()

# %% [markdown]
# **Notice:** memory belongs to the job, so the bytes of a run on any GPU are good for yours. Seconds belong
# to the card, its host, its network and its software: these B200s were slower than H100s, with an older
# attention kernel.

# %% [markdown]
# What is a step made of? For each micro-batch the GPU runs the kernels of every layer, then those of the
# head, the output layer with its loss. Once in a step, gradients are reduced and the optimizer runs. The
# *host*, a CPU core, starts each kernel: Python calls torch, and torch calls CUDA. Where it is slower than
# the GPU, the GPU waits.

# %%
step, seconds = lab.measured_step("1B", tensor=8, micro_batch=16)
print(step)
print(f"measured: {seconds:.2f} s")

# %% [markdown]
# | Attribute | Value |
# |:--|:--|
# | `step.layers`, `step.micro_batches` | their numbers; micro-batches of a step on each GPU |
# | `step.kernels` | the GPU's seconds for one layer of one micro-batch, forward and backward, with the collectives of tensor parallelism |
# | `step.launch` | the host's seconds to start these kernels |
# | `step.head` | the GPU's seconds for head and loss of one micro-batch |
# | `step.once` | seconds of what a step does once: reduced gradients, optimizer |

# %% [markdown]
# All 16 GPUs train one model of 1B parameters on 256 sequences a step, tensor parallel within a node: 8
# GPUs share each layer. With 16 sequences in a micro-batch the step took 2.35 seconds.
#
# Guess: the same job with 1 sequence in a micro-batch, and 16 times as many micro-batches. How many
# seconds?

# %%
# A guess, for exercise 6.16
### BEGIN SOLUTION
my_guess = 3
### END SOLUTION
labs.guess("6.16", "seconds of a step with one sequence in a micro-batch", my_guess)

# %% [markdown]
# ### Exercise 6.16 · Seconds of a step
#
# *Difficulty 2 of 5 · 10 minutes · target: four parts, exactly; median error of their sum at most 5 % on 57
# runs*
#
# Count layer by layer, as if the host could not be ahead: in each layer the GPU waits for as long as launch
# exceeds kernels. For head and optimizer, few and large kernels, it never waits. Return a dictionary with
# "kernels", "waiting for the host", "head" and "once", in seconds of a step.

# %%
# Exercise 6.16: the seconds of a step, by part
def step_parts(step):
    ### BEGIN SOLUTION
    layers = step.micro_batches * step.layers
    return {"kernels": layers * step.kernels,
            "waiting for the host": layers * max(0, step.launch - step.kernels),
            "head": step.micro_batches * step.head,
            "once": step.once}
    ### END SOLUTION


# %%
lab.check_step_parts(step_parts)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Draw two lanes for one micro-batch of two layers: the host starts the kernels of layer 1, then of layer 2;
# the GPU runs those of layer 1, then of layer 2. When does a layer end if the host takes longer? If the GPU
# does? Then count: how often does each part occur in a step?
#
# </details>

# %%
lab.show_steps(step_parts)

# %%
lab.show_launch_floor()

# %% [markdown]
# **Notice:** a layer takes at least 4.4 ms here, forward and backward, however little there is to compute. In
# that time the host starts its kernels. Such a job is **launch-bound**. More tensor-parallel ranks do not
# make it faster; larger micro-batches, fewer and larger kernels (`torch.compile`), or CUDA graphs, which
# start many kernels with one call, do.

# %% [markdown]
# A host that starts a layer in 4.4 ms, and kernels that reach a certain fraction of the peak: these constants
# were fitted to runs of nanotron, the library that ran them. Yours has others. So here are steps predicted
# with constants of *other* libraries, Megatron-LM, llm-foundry and torchtitan, and with a launch of 0,
# because nobody knows it:

# %%
large, large_seconds = lab.measured_step("1B", tensor=4, micro_batch=16, gpus=8, calibrated=False)
small, small_seconds = lab.measured_step("1B", tensor=8, micro_batch=1, gpus=8, calibrated=False)
for step, seconds in ((large, large_seconds), (small, small_seconds)):
    print(step)
    print(f"measured: {seconds:.2f} s")

# %% [markdown]
# ### Exercise 6.17 · Calibration by two steps
#
# *Difficulty 3 of 5 · 15 minutes · target: both numbers, on five machines*
#
# In `large` each layer waits for the GPU, in `small` for the host. `calibrate` returns two numbers, and
# `correct` the step with them, by `replace(step, kernels=..., ...)`:
#
# - `factor`: what `kernels` and `head` are multiplied with, so that `large` takes its measured seconds;
# - `launch`: the host's seconds for a layer, so that `small`, with that factor, takes its measured seconds.

# %%
# Exercise 6.17: (factor of the GPU's seconds, the host's seconds for a layer)
def calibrate(large, large_seconds, small, small_seconds):
    ### BEGIN SOLUTION
    gpu = (large_seconds - large.once) / large.micro_batches
    factor = gpu / (large.layers * large.kernels + large.head)
    micro_batch = (small_seconds - small.once) / small.micro_batches
    return factor, (micro_batch - factor * small.head) / small.layers
    ### END SOLUTION


def correct(step, factor, launch):
    ### BEGIN SOLUTION
    return replace(step, kernels=factor * step.kernels, head=factor * step.head, launch=launch)
    ### END SOLUTION


# %%
lab.check_calibrate(calibrate, correct)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Write down the sum of 6.16's parts for `large`, where nothing waits for the host and `factor` stands before
# `kernels` and `head`. Solve it for `factor`. In `small`, kernels and waiting together are `launch` for each
# layer: write down the sum with `launch` and `factor`, and solve it for `launch`.
#
# </details>

# %%
lab.show_calibrated(calibrate)

# %% [markdown]
# **Notice:** two steps, of 4 and of 19 seconds, correct the predictions of 1B, of a model eight times as large
# that was not measured, and, in part, of jobs on more GPUs. For 8B, whose kernels are larger, the factor adds
# nothing. What is left on more GPUs is the network, which two steps on one node say nothing of.

# %% [markdown]
# Now choose. For 8B parameters on 16 H100s, 25 plans were tried: 1, 2, 4 or 8 tensor-parallel ranks, DDP or
# ZeRO-1 over the others, 1 to 16 sequences in a micro-batch. Each plan has a predicted `memory`, and
# `memory_high`, the upper end of the interval that held 80 % of measured ranks.

# %%
plans = lab.candidates()
print(len(plans), "plans; one of them:")
print(plans[5])

# %% [markdown]
# `plan.free` is what CUDA and NCCL leave of the GPU, and `plan.step` is a step as in 6.16. Guess: how many of
# the 25 plans did *not* run out of memory?

# %%
# A guess, for exercise 6.18
### BEGIN SOLUTION
my_guess = 18
### END SOLUTION
labs.guess("6.18", "plans of 25 that ran", my_guess)

# %% [markdown]
# ### Exercise 6.18 · The fastest plan, before any runs
#
# *Difficulty 2 of 5 · 10 minutes · target: the right plan of 20 lists, five of them measured*
#
# A plan fits if `memory_high` is at most `free`. Your seconds are right to about 5 %, so all plans that fit
# and take at most 1.05 times the shortest step are equally good. `fastest` returns the one of these with the
# least `memory_high`, or None if no plan fits.

# %%
# Exercise 6.18: the fastest plan that fits
def fastest(plans):
    ### BEGIN SOLUTION
    def seconds(plan):
        return sum(step_parts(plan.step).values())

    fitting = [plan for plan in plans if plan.memory_high <= plan.free]
    shortest = min(map(seconds, fitting), default=0)
    near = [plan for plan in fitting if seconds(plan) <= 1.05 * shortest]
    return min(near, key=lambda plan: plan.memory_high, default=None)
    ### END SOLUTION


# %%
lab.check_fastest(fastest)

# %%
lab.show_fastest(fastest)

# %% [markdown]
# **Notice:** TP 2 with micro-batches of 2 is predicted to be faster than your plan, and at 79 of 82 GB it would
# fit. Only the interval, up to 90 GB, warns of it. It ran out of memory.

# %% [markdown]
# With a pipeline (notebook 07b) there is one more thing that no data sheet says:

# %%
lab.show_stalls()

# %% [markdown]
# **Notice:** a pipeline runs as predicted, or it loses the same time with every micro-batch. Of 2 stages each
# has one neighbour; of 4, those in the middle have two, and lose twice as much, whatever they send. No
# setting says which run it is: under the picture DDP stalls, in other pairs ZeRO-1 does. On 64 nodes nine of
# ten stall. So look at the *distribution* of step times before you trust a single one.

# %% [markdown]
# The same functions stand behind `labs.plan` and, in a terminal, `scripts/plan`. This is how they do on every
# public run whose settings are known:

# %%
lab.show_gpu_runs()

# %% [markdown]
# Try a job. Which plan of 64 H100s is the fastest for Llama-3-8B, and when does GPT-2 stop being
# launch-bound? The whiskers hold 80 % of the measured runs of the same kind. In a terminal,
# `scripts/plan Llama-3-8B --gpus 64xH100` proposes the three fastest, and `--calibrate` corrects them by one
# step that you measured: of launch, if the step is launch-bound, else of kernels.

# %%
labs.plan()

# %% [markdown]
# ## A reproducible record
#
# In a month you will ask: was the efficiency 78 or 87 percent, with which version of torch, with which
# batch size? You cannot compare a number without its machine and its versions. So let code write the
# record of a measurement.

# %%
lab.show_record()

# %% [markdown]
# The folder has a `README.md` with the tables and pictures made since the kernel started, the traces, and
# `numbers.json` with every number, the machine and the versions. (In JupyterLab, right-click the opened page
# for *Show Markdown Preview*.) A second record of the same day gets its own folder.

# %% [markdown]
# The table names, for each topic, the number that is furthest from its prediction. A number without a prediction is hard to doubt. With one, the largest error says what to measure again,
# or which formula left something out.

# %% [markdown]
# `papers.md` in the same folder has ten questions on the ZeRO and FSDP papers, with the sections that
# answer them. Below each question stand the numbers that *you* measured on it, or a blank line. Answer each
# in two sentences; no check reads them.

# %% [markdown]
# ## Cluster launchers
#
# Your `train.py` reads everything it needs from its environment. So when it moves to more hosts, only the
# launcher changes. The folder `scripts/cluster` has a file for each:
#
# | File | Starts your script on |
# |:--|:--|
# | `torchrun-hosts` | hosts that you can log in to: the same line on each |
# | `train.sbatch` | a cluster with Slurm |
# | `sky.yaml` | rented nodes, with SkyPilot |
# | `ray_train.py` | a Ray cluster |

# %% [markdown]
# On hosts that you can log in to, run one command on each; all meet at one of them, here node1:
#
# ```sh
# torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node1:29500 \
#     --rdzv-id train work/train.py --epochs 2
# ```
#
# Slurm gives each job a number and a list of nodes. The file derives `torchrun`'s options from
# them, and starts one `torchrun` on each node:

# %%
lab.show_cluster_file("train.sbatch")

# %% [markdown]
# In the workbook's folder, on a cluster:
#
# ```sh
# sbatch --nodes=4 --gpus-per-node=8 scripts/cluster/train.sbatch work/train.py --epochs 2
# ```
#
# | Launcher | Fits |
# |:--|:--|
# | `torchrun` on each host | a few hosts of your own |
# | Slurm | a fixed cluster that many people share |
# | Kubernetes with Kubeflow Trainer | a cluster that already runs Kubernetes |
# | Ray Train | Python programs of which training is one part |
# | SkyPilot | rented nodes, spot instances, or several clouds |
#
# `scripts/cluster/README.md` says what each costs you, and what breaks first. None of them makes a step
# faster.

# %% [markdown]
# ## Optional: speed-up and efficiency
#
# Speed-up and efficiency are easily confused, and the wrong word hides the cost: a speed-up of 1.6 on two
# GPUs sounds like a gain, but 20 % of the paid GPU-hours are lost.
#
# ### Exercise 6.3 · Speed-up and efficiency
#
# *Difficulty 1 of 5 · 5 minutes · target: a function for any number of ranks, and two efficiencies*

# %%
# Exercise 6.3: the efficiency of N ranks
def efficiency(ranks, throughput, alone):
    """A number, 1 if nothing is lost. throughput: tokens/s of all ranks together; alone: of one."""
    ### BEGIN SOLUTION
    return throughput / (ranks * alone)
    ### END SOLUTION

# %% [markdown]
# An example, made up for this exercise: a release note promises a figure that it calls an efficiency.

# %%
note = lab.show_release_note()
note

# %% [markdown]
# An efficiency above 1 needs a special reason, so the note must mean a speed-up. Which efficiencies does
# it mean? Use your function. `note.gpus`, `note.lowest` and `note.highest` are the note's numbers.

# %%
# Exercise 6.3, second half: a pair of numbers, the lowest and the highest efficiency
### BEGIN SOLUTION
claimed = efficiency(note.gpus, note.lowest, 1), efficiency(note.gpus, note.highest, 1)
### END SOLUTION

# %%
lab.check_efficiency(efficiency, claimed)

# %% [markdown]
# ## Optional: the α–β model
#
# How many seconds does an all-reduce take? The **α–β model** says α + bytes/β. α is the latency: the time
# of an all-reduce of zero bytes, in seconds. β is the bandwidth of the link, in bytes per second. Both
# are fitted to measured all-reduces. In a ring over all N ranks, a host sends 2(N-1)/N · S bytes over its
# link.

# %% [markdown]
# ### Exercise 6.5 · The α–β model
#
# *Difficulty 2 of 5 · 5 minutes · target: two numbers, for any number of hosts and of ranks per host*

# %%
# Exercise 6.5: what a ring all-reduce sends over a host's link, and its seconds
def link_seconds(size, hosts, ranks, alpha, beta):
    """(bytes in each direction of a host's link, seconds); size in bytes, ranks on each host,
    alpha in seconds, beta in bytes per second. One host alone sends nothing over its link."""
    ### BEGIN SOLUTION
    n = hosts * ranks
    nbytes = 2 * (n - 1) / n * size if hosts > 1 else 0
    return nbytes, alpha + nbytes / beta
    ### END SOLUTION


# %%
lab.check_link_seconds(link_seconds)

# %% [markdown]
# The next picture uses the all-reduces that `lab.show_link_bytes()` timed, in the section on the ring. In a new
# kernel it measures them first. A barrier precedes each all-reduce; otherwise the time would include how
# late the last rank arrives.

# %%
lab.show_fit(link_seconds)

# %% [markdown]
# The circles, all at 50 Mbit/s, were used to fit α and β. The diamonds were not: they have another size, or
# a link with half or twice the bandwidth, for which β is halved or doubled. Your function predicts
# them within a tenth. β is below the link's 6.25 MB/s because of headers and pauses, and α is negligible at
# these sizes. Each time is the minimum of three rounds, because a busy core only adds time.

# %% [markdown]
# ## Optional: training cost
#
# In the offers below, an H100 for an hour costs between 2.69 and 6.88 dollars, and other sellers ask
# more or less. A higher hourly price can still be a lower price per token. So compare machines by
# **tokens per dollar**, from measured throughput.
#
# In a new kernel, first run the cells of exercise 6.9.

# %%
MACHINES = lab.price_table()  # or lab.price_table({"Lambda 1x A10": 0.75}), or a JSON file
lab.show_prices(MACHINES)

# %%
machine = MACHINES["Lambda 8x A100-80"]
machine

# %% [markdown]
# These are offers of three sellers. Public repositories, which the last column names, copied them from the
# sellers' pages: look up the current price before you pay. A price that you pass replaces the table's.
# `machine.dollars` is the on-demand price per GPU and hour, `machine.gpus` the number of GPUs.
#
# Guess: what does a billion tokens cost on that machine, for a model of 1.3B parameters?

# %%
# A guess, for exercise 6.12
### BEGIN SOLUTION
my_guess = 60
### END SOLUTION
labs.guess("6.12", "dollars per billion tokens, 1.3B parameters on 8 A100", my_guess)

# %% [markdown]
# ### Exercise 6.12 · Tokens per dollar
#
# *Difficulty 1 of 5 · 5 minutes · target: both numbers, on machines of 1 to 64 GPUs*

# %%
# Exercise 6.12: what tokens cost
def costs(tokens_per_s, machine):
    """(tokens per dollar, dollars per 1e9 tokens); tokens_per_s: of all GPUs together."""
    ### BEGIN SOLUTION
    per_dollar = 3600 * tokens_per_s / (machine.gpus * machine.dollars)
    return per_dollar, 1e9 / per_dollar
    ### END SOLUTION


# %%
lab.check_costs(costs)

# %%
DOLLARS_PER_HOUR = 0.05  # of the core (or GPU) that 6.9 measured: what do you pay for it?
lab.show_costs(costs, own, DOLLARS_PER_HOUR, MACHINES)

# %% [markdown]
# The most expensive of these offers costs 2.8 times the cheapest, but an A100-80 and an H100 of one seller
# never differ by more than a factor of 1.6. Your own machine is marked with the FLOP/s that it reached in
# 6.9: a low price per hour is not always a low price per token.

# %% [markdown]
# The next table applies your function to two budgets. For the A100s there are published throughputs. For
# the A10 there is none, so its MFU is an assumption: change it.

# %%
lab.show_budget(costs, mfu=0.3, machines=MACHINES)

# %% [markdown]
# The Chinchilla rule asks for 20 tokens per parameter. An evening on two A10s pays for half of them for a
# GPT-2, and an hour on eight A100s for more than all. In the same hour, a model ten times as large gets half
# a token per parameter.

# %% [markdown]
# ## Optional: spot instances
#
# A **spot** instance costs less because its seller may preempt it at any moment. An **interruption** loses
# the work since the last checkpoint, half an interval on average, and you pay for the restart too. How many
# interruptions per hour make on-demand instances cheaper?

# %% [markdown]
# On 6 August 2026 an AWS p5en cost 7.91 dollars per GPU and hour on demand, and 3.40 on spot. Guess: with a
# checkpoint every half hour and restarts of 6 minutes, at how many interruptions an hour do both cost the
# same?

# %%
# A guess, for exercise 6.14
### BEGIN SOLUTION
my_guess = 3
### END SOLUTION
labs.guess("6.14", "interruptions an hour at break-even", my_guess)

# %% [markdown]
# To first order, billed hours are hours · (1 + rate·lost), with lost = interval/2 + restart. But the
# recomputed work can be interrupted again, and so can a restart. If interruptions are independent of each
# other, the exact mean is known (Daly, 2006, equation 20). `save` is the hours of a save, and `mtbf` is the
# mean hours between interruptions:

# %%
lab.expected_wall(work=100, interval=0.5, save=0, restart=0.1, mtbf=1)  # billed hours

# %% [markdown]
# ### Exercise 6.14 · Expected cost on spot instances
#
# *Difficulty 3 of 5 · 15 minutes · target: dollars within 4 % of an event simulation, the break-even rate
# within 3 % of the exact one*
#
# Interruptions come at any moment, `rate` of them per *billed* hour. Checkpoints are `interval` hours
# apart and take no time. Prices are per hour.

# %%
# Exercise 6.14: expected cost on spot, and the rate at which it stops paying
def spot_costs(hours, on_demand, spot, rate, interval, restart):
    """(expected dollars for `hours` of training on spot, interruptions per hour at break-even)."""
    ### BEGIN SOLUTION
    def billed(rate):
        return lab.expected_wall(hours, interval, 0, restart, 1 / rate)

    low, high = 0, 20 / (interval + restart)  # at this rate no price of spot is low enough
    for _ in range(50):
        middle = (low + high) / 2
        pays = spot * billed(middle) < on_demand * hours
        low, high = (middle, high) if pays else (low, middle)
    return spot * billed(rate), low
    ### END SOLUTION


# %%
lab.check_spot_costs(spot_costs)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Dollars are billed hours × price. At break-even both cost the same, so the ratio of billed hours to hours
# of training equals the ratio of the two prices: solve for the rate.
#
# The exact mean has no closed-form solution for the rate, but the dollars grow with the rate. So begin with
# a rate at which spot pays and one at which it does not, and bisect the interval between them until it is
# narrow. (Or find a close approximation: what does 1 + x become if x itself grows by its own share, again
# and again?)
#
# </details>

# %%
lab.show_spot(spot_costs, lab.price_table()["AWS p5en.48xlarge"])

# %% [markdown]
# With a checkpoint every half hour, spot pays off up to 2.26 interruptions an hour; with one every
# three hours, up to 0.39. The dotted first-order line is right only if little is lost: its break-even
# rates are 68 % too high. Another short formula, hours / (1 - rate·lost), is 28 % too low. Notebook 08
# asks how often to save.

# %% [markdown]
# ## Optional: an FSDP and HSDP training script from scratch
#
# 7B parameters with AdamW in fp32 have 112 GB of states: too much for a GPU of 80 GB. FSDP over 64 GPUs
# leaves 1.75 GB on each, but every all-gather crosses the link between hosts. HSDP on 8 hosts of 8 GPUs
# leaves 14 GB, and only gradients cross the link. So the script chooses by an option.

# %% [markdown]
# Write such a script. Its mistakes would be silent: with a mean of means the loss falls too. As in exercise
# 6.2, its sequences have answers of different lengths.

# %% [markdown]
# | Call | Returns |
# |:--|:--|
# | `models.gpt2(layers, hidden, seed=s)` | the model, the same on each rank |
# | `models.blocks(model)` | the list of its transformer blocks |
# | `answer_samples(number, seed)` | a list of `number` sequences of 32 tokens: dictionaries that a `DataLoader` collates into batches |
# | `count_answers(batch)` | the number of answer tokens, a tensor |
# | `loss_sum(module, batch)` | the sum of their losses, as in exercise 6.2 |
# | `torch.nn.utils.clip_grad_norm_(parameters, most)` | the global norm before clipping; for sharded gradients a DTensor, whose `.full_tensor()` has the number |

# %% [markdown]
# | Option | Default | Meaning |
# |:--|:--|:--|
# | `--samples` | 48 | sequences |
# | `--batch` | 2 | sequences per micro-batch and rank |
# | `--accumulate` | 3 | micro-batches per step and rank |
# | `--epochs` | 2 | passes over the data |
# | `--seed` | 0 | of model, data and sampler |
# | `--layers`, `--hidden` | 2, 64 | of the model |
# | `--clip` | 1.0 | the maximum global norm of the gradients |
# | `--replicas` | 1 | 1: FSDP; more: HSDP with so many replicas, on a 2-D mesh |
# | `--metrics` | `"job.json"` | the file that rank 0 writes |

# %% [markdown]
# ### Exercise 6.15 · `job.py`
#
# *Difficulty 5 of 5 · 60 minutes · target: on 2 and 2 × 2 ranks a half of the parameters on each, and the
# reference's losses, norms and clipped gradients*

# %% [markdown]
# Use AdamW with a learning rate of 1e-3; each block is a unit, the model the root. Rank 0's file has
# `{"ranks": N, "steps": [{"loss": ..., "tokens": ..., "norm": ...}, ...]}`. "loss" is the mean over the
# answer tokens of a step on *all* ranks; "norm" is the global norm before clipping. The number of samples
# is divisible by ranks × batch × accumulate.

# %%
lab.write_script("job.py")

# %%
lab.check_job("job.py")

# %% [markdown]
# <details><summary>Hint</summary>
#
# Which numbers need all ranks? The tokens before the first backward; the loss and the norm after the
# last one. FSDP divides gradients by the number of *all* ranks, also on a 2-D mesh: by what must you
# multiply each loss?
#
# Outline: (1) options; (2) process group and device, as in `train.py`; (3) a mesh of (replicas, ranks of a
# replica), of which plain FSDP takes only the second dimension; (4) blocks, root, optimizer; (5) epochs, in
# them groups of `--accumulate` micro-batches; (6) in a step: tokens, backwards, clip, step, zero; (7) rank
# 0 writes.
#
# </details>

# %%
job = lab.torchrun("job.py", "--samples", 96, "--clip", 1, ranks=2)
job

# %%
lab.show_job(job)

# %% [markdown]
# The norms in the table are above 1, so these steps were clipped to a global norm of 1. If each rank clipped
# by the norm of its own shards, each rank's shards would have a norm of 1, and the global norm would be √2;
# on 64 ranks it would be 8. The loss would fall, and no log would show the mistake.

# %% [markdown]
# ## I can …
#
# - write a script that any launcher starts
# - normalize the loss of uneven batches so that every token counts once
# - tell a speed-up from an efficiency, and attribute the overhead to causes
# - predict the bytes of an all-reduce between hosts
# - build a hierarchical all-reduce, and say when HSDP is worth its memory
# - compute MFU against the dense peak, and say which strategy a library really ran
# - predict a step's seconds, correct them, and choose the fastest plan that fits

# %% [markdown]
# ## How it usually goes wrong
#
# - **No `set_epoch`**: every epoch has the same order, and nothing warns.
# - **A mean of means**: tokens on ranks with few answer tokens weigh too much.
# - **The sparse peak**: it halves every MFU.
# - **Trusting a configuration file**: only traffic and memory show which strategy ran.
# - **Small micro-batches on many tensor-parallel ranks**: the GPUs wait for their hosts.
# - **A flat ring over one slow card per host**: that card carries almost 2 S.

# %% [markdown]
# ## What to read
#
# | read | by | a question |
# |:--|:--|:--|
# | [torchrun](https://docs.pytorch.org/docs/stable/elastic/run.html) | PyTorch | Which variables does it set? |
# | [PyTorch FSDP](https://arxiv.org/abs/2304.11277) | Y. Zhao et al., VLDB 2023, section 3.2.2 | Which bytes of hybrid sharding cross hosts? |
# | [PaLM](https://arxiv.org/abs/2204.02311) | A. Chowdhery et al., 2022, appendix B | Why does MFU leave recomputation out? |
# | [Reducing activation recomputation](https://arxiv.org/abs/2205.05198) | V. Korthikanti et al., 2022, section 6 | Where do MFU and HFU differ most? |
# | [Machine Learning Engineering](https://github.com/stas00/ml-engineering/blob/master/training/model-parallelism/README.md) | S. Bekman | What does it try first on several nodes? |

# %% [markdown]
# ## What comes next
#
# Notebook **07a Tensor parallel** shards single layers and single sequences that are too large for data
# parallelism. After it, 07b shards the model's depth, and 08 survives failures.
