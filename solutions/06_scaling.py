# %% [markdown]
# # 06 · Scaling
#
# | | |
# |:--|:--|
# | **Time** | 240 minutes in two sittings, the second from "What limits it"; 60 for the optional exercise |
# | **Needs** | any machine with 2 cores; Linux for the two hosts; no GPU |
#
# So far `launch` has started your ranks, on one machine. Here you write a job of your own, run it on
# two hosts with a real link between them, and find out what limits it and what it costs.

# %% [markdown]
# *On one GPU* the ranks of a measurement share it, with gloo, so what you read as efficiency is two
# programs that wait for one GPU. On a node every rank has its own. The two hosts always compute on
# the CPU: what is measured there is the link.

# %% [markdown]
# ## You will be able to
#
# - write a training script that `torchrun`, `accelerate launch` and Slurm start unchanged;
# - divide the time that N ranks lose into its causes;
# - predict and count what a strategy puts on the link between hosts, and choose one for a cluster;
# - compute MFU and HFU, and predict the step of a published run;
# - prove from traffic and memory which strategy a library really ran;
# - say what a billion tokens cost.

# %%
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import labs
import labs.scaling as lab

labs.warm_up()

# %% [markdown]
# ## A job of your own
#
# `launch` exists in this workbook alone. On 8 hosts with 8 GPUs each, a job is a *script*, and 64
# processes run it: on each host `torchrun` starts 8, and tells each one who it is through variables of
# the environment. Nothing else is passed on, so every launcher can start the same script.
#
# `lab.torchrun(script, *options, ranks=2)` types the command for you and shows its output.

# %%
with open("who.py", "w") as file:
    file.write("""\
import os
import sys

found = (f"{name}={os.environ[name]}" for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
sys.stdout.write(" ".join(found) + "\\n")  # in one write: the ranks share the output
""")
lab.torchrun("who.py", ranks=2)

# %% [markdown]
# | Variable | is |
# |:--|:--|
# | `RANK`, `WORLD_SIZE` | this process among those of all hosts, and their number |
# | `LOCAL_RANK`, `LOCAL_WORLD_SIZE` | this process among those of its host: it chooses the GPU |
# | `MASTER_ADDR`, `MASTER_PORT` | where all meet, the **rendezvous** |
#
# `dist.init_process_group()` without arguments reads them.

# %% [markdown]
# ## Who trains on what?
#
# 64 processes run one script, so they all do *the same*: without a sampler, 64 ranks train on the same
# samples. The loss falls, and 63 GPUs are paid for nothing. Three calls divide the samples:
#
# | Call | does |
# |:--|:--|
# | `DistributedSampler(windows, seed=s)` | this rank's part of one shuffled order; repeats a few where ranks do not divide it |
# | `DataLoader(windows, batch, sampler=sampler)` | batches of these samples |
# | `sampler.set_epoch(number)` | shuffles anew: the order depends on the seed and this number |

# %% [markdown]
# Guess before you write it: 64 samples, batches of 4 on each of 2 ranks, 2 epochs. How many optimizer
# steps does each rank take?

# %%
# A guess, for exercise 6.1
### BEGIN SOLUTION
my_guess = 16
### END SOLUTION
labs.guess("6.1", "optimizer steps of a rank", my_guess)

# %% [markdown]
# ### Exercise 6.1 · `train.py`
#
# *Difficulty 3 of 5 · 25 minutes · target: every sample once an epoch on 2 and 3 ranks, losses and
# parameters as one process has them*
#
# The next cell writes the file `train.py`. Fill in its three gaps. `models.blocks(model)` is the list
# of the transformer blocks; each one, and then the whole model, is a unit of FSDP.

# %% [markdown]
# `train` returns a dictionary for each step:
#
# | Key | is |
# |:--|:--|
# | "loss", "tokens" | of *all* ranks in this step |
# | "learning_rate" | with which the step was taken |
# | "seconds" | since the step before |

# %%
lab.write_script("train.py")

# %% [markdown]
# <details><summary>Hint</summary>
#
# First gap: sampler, loader, then one wrapper; with FSDP the blocks come before the whole model.
#
# Second gap: the loop that you know, in a loop over epochs. For the reported loss, each rank has a mean
# and a number of samples. What must be summed over the ranks so that one division at the end is right?
# Look at the scheduler: its `total_iters` is the number of *steps*, so how often is it stepped?
#
# Third gap: which ranks get there, and how many of them may open the file?
#
# </details>

# %%
lab.check_train("train.py")

# %%
trained = lab.torchrun("train.py", "--samples", 64, "--batch", 4, "--epochs", 2, ranks=2)
trained

# %%
lab.show_metrics(trained)

# %% [markdown]
# **Notice:** one line was printed, and one file was written, by two processes. A step has the tokens of
# both ranks, and the learning rate falls by the same amount in each: twice as fast would mean that
# somebody stepped the schedule once for each rank. You will start this file on two hosts and with
# `accelerate launch`, unchanged.

# %% [markdown]
# ## Ragged tokens
#
# In fine-tuning, only the tokens of an *answer* count; prompts and padding have the label -100. If rank
# 0 has answers of 2 tokens and rank 1 of 30, the mean of the two ranks' means gives a token of rank 0
# the weight of 15 of rank 1's.

# %% [markdown]
# transformers averaged so by default, first in both ways, then in one:
#
# | Means of means | until | fixed by |
# |---|---|---|
# | over micro-batches | October 2024 | pull request *[34191](https://github.com/huggingface/transformers/pull/34191)* |
# | over ranks | July 2025 | an option, off by default, of October 2024 (*[34373](https://github.com/huggingface/transformers/pull/34373)*); on by default since *[39395](https://github.com/huggingface/transformers/pull/39395)* |

# %%
batch = lab.answers([2, 5])  # two answers, of 2 and 5 tokens, each after a prompt of 8
print(batch["labels"])
print(lab.count_answers(batch), "tokens count")

# %% [markdown]
# | Call | returns |
# |:--|:--|
# | `lab.count_answers(batch)` | the number of answer tokens, an integer tensor that can be all-reduced |
# | `lab.loss_sum(module, batch)` | the *sum* of their losses, to be differentiated; 0 without any |
#
# Guess: answers of 2 tokens on rank 0, of 30 on rank 1. By how many percent of its norm is the gradient
# of the mean of means off?

# %%
# A guess, for exercise 6.2
### BEGIN SOLUTION
my_guess = 30
### END SOLUTION
labs.guess("6.2", "error of the mean of means, % of the gradient's norm", my_guess)

# %% [markdown]
# ### Exercise 6.2 · Every token once
#
# *Difficulty 3 of 5 · 15 minutes · target: gradients and loss of the mean over all answer tokens, on 2,
# 3 and 4 ranks, also where a rank has none*
#
# `module` is wrapped in DDP: each `backward` adds the *mean over the ranks* of what they differentiate.
# A rank trains on several micro-batches before one optimizer step, which the caller takes.

# %%
# Exercise 6.2: one step of all ranks on ragged micro-batches
def ragged_step(module, micro_batches):
    """Leaves the gradients in place; returns the mean loss over the answer tokens of all ranks."""
    ### BEGIN SOLUTION
    tokens = sum(lab.count_answers(batch) for batch in micro_batches)
    dist.all_reduce(tokens)
    total = 0
    for batch in micro_batches:
        loss = lab.loss_sum(module, batch) / tokens
        (dist.get_world_size() * loss).backward()
        total += loss.detach()
    dist.all_reduce(total)
    return total
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint</summary>
#
# The denominator is one number for all ranks and all micro-batches, so you need it before the first
# backward. How many all-reduces does that take?
#
# Then write down what DDP makes of your loss: it divides the sum over the ranks by their number, once.
# What must each rank multiply by, so that only your denominator is left?
#
# A rank without answer tokens still runs forward and backward: the others wait for its gradients.
#
# </details>

# %%
lab.check_ragged_step(ragged_step)

# %%
lab.show_ragged(ragged_step)

# %% [markdown]
# **Notice:** with answers of equal lengths the mean of means is right, and that is how the mistake
# survives a test. The more uneven the lengths, the further its gradient is off; yours is not.
# %% [markdown]
# ## Efficiency
#
# A job takes 100 hours on one GPU. On two GPUs it runs 1.6 times as fast: it ends after 62.5 hours,
# but you pay for 125 GPU-hours. Where did 25 hours go? Of 1,024 GPUs, the same loss is 205 GPUs that
# do nothing. So it is worth measuring, and dividing into its causes.

# %% [markdown]
# **Speed-up** is the throughput of N ranks, in times that of one; **efficiency** is the speed-up
# divided by N. In **weak scaling** the batch *of a rank* stays, so N ranks do N times the work in a
# step. In **strong scaling** the batch *of all ranks together* stays: a rank computes 1/N of it, but
# sends gradients that are as large.
#
# Guess: how efficient is weak scaling here, with a rank on each core, or each GPU?

# %%
# A guess, for exercise 6.3: in percent
### BEGIN SOLUTION
my_guess = 80
### END SOLUTION
labs.guess("6.3", "efficiency of weak scaling, in percent", my_guess)

# %% [markdown]
# The next cell trains a GPT-2 with DDP on 1 rank, on 2, and so on, in turns (10 to 30 s). On a CPU a
# rank computes with one thread, and its collectives pass the slow link of notebook 05. The last
# number of ranks is twice the number of cores: two ranks share each. The shape of the curves is what
# counts here. Expect little: on that link gradients take most of a step.

# %%
scaling = lab.measure_scaling()
scaling

# %% [markdown]
# ### Exercise 6.3 · Efficiency
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
# Speed-up and efficiency are easily confused. An example, made up for this exercise: a release note
# promises "1.5–1.7× scaling efficiency on 2 GPUs". No efficiency is above 1 without a special reason, so
# the words are wrong. Which efficiencies are meant? Use your function.

# %%
# Exercise 6.3, second half: a pair of numbers, the lowest and the highest efficiency
### BEGIN SOLUTION
claimed = efficiency(2, 1.5, 1), efficiency(2, 1.7, 1)
### END SOLUTION

# %%
lab.check_efficiency(efficiency, claimed)

# %%
lab.show_scaling(scaling, efficiency)

# %% [markdown]
# **Notice:** strong scaling loses more than weak scaling, because the bytes stay the same while the
# computing that could hide them shrinks: on a slow link more ranks can even be slower than one. Where
# two ranks share a core (grey), computing takes twice
# as long: efficiency falls, and more ranks cannot help. So a figure of efficiency means nothing
# without three others: how many ranks, weak or strong, and the throughput of one.

# %% [markdown]
# ## Why not N times as fast?
#
# Each moment of a rank's step counts once, for the first that fits:
#
# 1. *computing*: an interval of `trace.compute`;
# 2. *data loading*: a label of torch's data loader;
# 3. *communication*: a collective is in flight that has begun on all ranks;
# 4. *waiting*: one is in flight that has not begun on the last rank;
# 5. *computing* again: the rest, such as Python.
#
# So what computing hides costs nothing, as in notebook 05.

# %% [markdown]
# The next cell records one rank alone, and all ranks, each with the same work as the one (10 to 40 s).
# The runs: healthy, without the link of notebook 05; on a slow link, with the last rank slow, with a
# slow data loader, and with all ranks computing slowly, as on GPUs that are too hot. (On GPUs the slow
# link is the real one, and each bucket is sent many times.) Which part grows in which run?

# %%
runs = lab.record_lost_time()
runs

# %% [markdown]
# `runs` is a dictionary: `runs["slow rank"]` is a list with one trace per rank, `runs.alone` a list
# with one trace. All times of a run are on *one axis*, so you may compare them across ranks. Every
# rank issues the same collectives in the same order.

# %%
for trace in runs["slow rank"]:
    first = trace.collectives[0]
    print(f"rank {trace.rank}: begins at {first.begin:.4f} s, ends at {first.end:.4f} s")

# %% [markdown]
# | What | is, or returns |
# |:--|:--|
# | `trace.collectives` | a tuple of collectives with `begin` and `end`, in the order of their calls |
# | `trace.compute` | disjoint intervals `(begin, end)` |
# | `trace.labelled("enumerate(DataLoader)")` | a list of spans |
# | `trace.seconds`, `trace.steps` | of all recorded steps together; a list of the steps |
# | `lab.union(spans)` | the disjoint intervals that spans, or intervals, cover together |
# | `lab.subtract(intervals, others)` | the parts of `intervals` that `others` do not cover |
# | `lab.total_seconds(intervals)` | how long they last together |

# %% [markdown]
# ### Exercise 6.4 · Divide the lost time
#
# *Difficulty 4 of 5 · 30 minutes · target: on 19 synthetic runs and 2 recorded ones, parts that add up
# to the step and to what it loses*
#
# It has two cells, and the check stands below the second one. First the parts of a rank's step. The
# k-th collective of a rank is the k-th of every other rank, too.

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
# What is lost is a step of `run`, less a step of `alone`: part by part. But which rank's step? A slow
# rank shows on the *others*, in whose steps its delay is waiting; in its own it looks like computing.
# So take all parts from *the rank that waits most*. A part may be below 0: a rank of `run` then
# does it faster than the one alone.

# %%
# Exercise 6.4, second half: what a step loses, against the step of one rank alone
def divide_lost_time(run, alone):
    """The same four keys; the sum is the step of the rank that waits most, less that of `alone`."""
    ### BEGIN SOLUTION
    parts = [parts_of_step(run, rank) for rank in range(len(run))]
    waits_most = max(parts, key=lambda part: part["waiting"])
    single = parts_of_step(alone, 0)
    return {part: waits_most[part] - single[part] for part in single}
    ### END SOLUTION

# %% [markdown]
# <details><summary>Hint</summary>
#
# Work with intervals until the end, and add up seconds only then. For each collective you need one
# moment that no single trace has: when it began on the last rank. `zip` over the ranks' collectives
# gives it. From that moment to its end it moves, which makes one list of intervals; what is in flight
# without moving is the second; the loader's labels are the third. Subtract from each what comes
# before it in the list of parts. Computing is what is left of the step.
#
# </details>

# %%
lab.check_divide_lost_time(parts_of_step, divide_lost_time)

# %%
lab.show_lost_time(runs, divide_lost_time)

# %% [markdown]
# **Notice:** the longest bar of each slow run names its cause, and so what to mend: the link, one
# rank, the data loader, or the computing of all. From the seconds of a step, the four could not be
# told apart. Where `healthy` loses time to slower computing, it is *contention*: the ranks share
# memory, caches and power that one rank had for itself.

# %% [markdown]
# Why may traces of several processes be compared? The profiler reads the clock of the host, and all
# ranks here have the same. Clocks of several hosts differ by milliseconds, more than many a
# collective takes. There, first shift each host's trace until the ends of the same barrier agree: no
# rank leaves a barrier before the last one has come.
# %% [markdown]
# ## Two hosts
#
# Inside a host, H100s reach each other at 450 GB/s in each direction. In a training cluster each H100 has
# a network card of 400 Gbit/s, or 50 GB/s (*[Llama 3](https://arxiv.org/abs/2407.21783)*, section 3.3.1),
# so eight of them carry 400 GB/s. On a small cloud all GPUs of a host share one card, often of 10 Gbit/s,
# or 1.25 GB/s. What does your job put on that link, and what does it cost?

# %% [markdown]
# The lab makes two hosts of this machine: each has its own address, host name and processes, and one
# link whose bandwidth is set. That is the slow case, in which the link decides.

# %% [markdown]
# You need no rights of an administrator for that, only Linux. A machine that cannot have hosts
# (macOS, a locked container) says why, and shows a recorded run instead.
#
# Your `train.py` starts on both hosts, unchanged: `torchrun --nnodes 2`, with two ranks on each. The
# hosts find each other by rendezvous: the first one opens a port, and the others connect to it.
# The links carry 200 Mbit/s here, and other bandwidths below.

# %%
lab.run_on_two_hosts("train.py", "--epochs", "1", "--metrics", "two_hosts.json")

# %% [markdown]
# **Notice:** only rank 0, on host 0, prints. The bytes come from the kernel's own counters of each
# host's link. Almost all are gradients. Host 0 sends 1 MB more: before the first step DDP sends rank
# 0's parameters, 0.5 MB, to each of the two ranks on host 1.

# %% [markdown]
# ## Bytes on the link
#
# In a ring over all N ranks each rank sends 2(N-1)/N · S bytes for an all-reduce of S bytes, and only
# to the next rank. Ranks are numbered host by host, so of a host's ranks only the last one has its
# next rank on another host.
#
# Guess: four ranks on two hosts all-reduce 4 MB. How many MB does a host send over its link?

# %%
# A guess, for exercise 6.5
### BEGIN SOLUTION
my_guess = 4
### END SOLUTION
labs.guess("6.5", "MB that a host sends over its link in an all-reduce of 4 MB", my_guess)

# %% [markdown]
# How long does it take? The **α–β model** says: α + bytes/β. α is what an all-reduce takes however
# small it is, in seconds; β is what the link carries, in bytes per second. Both are fitted to
# measured all-reduces.
#
# ### Exercise 6.5 · Bytes and seconds of an all-reduce
#
# *Difficulty 2 of 5 · 5 minutes · target: two numbers, for any number of hosts and of ranks on each*

# %%
# Exercise 6.5: what a ring all-reduce puts on a host's link, and its seconds
def link_seconds(size, hosts, ranks, alpha, beta):
    """(bytes in each direction of a host's link, seconds); size in bytes, ranks on each host,
    alpha in seconds, beta in bytes per second. On one host no byte passes a link."""
    ### BEGIN SOLUTION
    n = hosts * ranks
    nbytes = 2 * (n - 1) / n * size if hosts > 1 else 0
    return nbytes, alpha + nbytes / beta
    ### END SOLUTION


# %%
lab.check_link_seconds(link_seconds)

# %% [markdown]
# Now measure. One start of torchrun counts the bytes of three kinds of collectives, and times
# all-reduces of several sizes on links of 25, 50 and 100 Mbit/s, in turns. Each all-reduce begins
# behind a barrier: otherwise you time how late the last rank comes.

# %%
all_reduces = lab.measure_all_reduces()
lab.show_link_bytes(all_reduces)

# %% [markdown]
# **Notice:** all-reduce and all-gather are 1 % above their formulas: the headers of TCP. The
# reduce-scatter is twice its formula, as much as an all-reduce, because gloo makes it of one and drops
# what a rank does not need. NCCL has a real one. A library keeps to the formula only if it implements
# the algorithm, so count.

# %%
fitted = lab.fit_all_reduces(all_reduces)
print(fitted)
lab.show_fit(all_reduces, fitted, link_seconds)

# %% [markdown]
# **Notice:** the circles, all at 50 Mbit/s, gave α and β. The diamonds were not fitted: another size,
# or a link with half or twice the bandwidth, for which β is halved or doubled. Your two numbers
# predict them within a tenth. β is below the link's 6.25 MB/s, by headers and pauses, and α is
# hardly seen beside such seconds. (A time is the fastest of three rounds: a busy core only adds.)

# %% [markdown]
# ## Fewer bytes between hosts
#
# The flat ring sends 1.5 S over the link, though the other host needs only one sum. **Hierarchical
# all-reduce** has three steps: reduce-scatter inside each host, so that each of its R ranks has the
# host's sum of S/R; all-reduce of these between hosts; all-gather inside.

# %% [markdown]
# NCCL has this built in: *[on two nodes](https://github.com/NVIDIA/nccl-tests/issues/196)* it uses a *tree*
# (or *NVLSTree*), which *[adds up inside the node](https://github.com/NVIDIA/nccl/issues/530)* first. On
# more nodes it chooses by size, bandwidth and latency.
# [`NCCL_ALGO`](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-algo) forces a
# choice, such as `Ring`, for a test. torch's gloo uses the flat ring, so here you build what NCCL does.
#
# Guess: how many MB does a host send now, for 4 MB on two hosts with two ranks each?

# %%
# A guess, for exercise 6.6
### BEGIN SOLUTION
my_guess = 2
### END SOLUTION
labs.guess("6.6", "MB that a host sends in a hierarchical all-reduce of 4 MB", my_guess)

# %% [markdown]
# A `DeviceMesh` with two dimensions has a row of ranks for each host:
#
# | Expression | is |
# |:--|:--|
# | `mesh["inside"]` | the ranks of this rank's host; `.size()` of them |
# | `mesh["across"]` | the ranks with the same place on each host |
# | `mesh["inside"].get_group()` | their process group, for `group=` of a collective |
#
# ### Exercise 6.6 · Hierarchical all-reduce
#
# *Difficulty 4 of 5 · 20 minutes · target: the sum in place, for any size; 2(H-1)/H · S/R from each
# rank to other hosts*

# %%
# Exercise 6.6: the sum over all ranks, of which only 1/R of each rank's tensor leaves its host
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
# `dist.reduce_scatter_single` and `dist.all_gather_single` want flat tensors: the whole has
# exactly R times as many elements as the piece. So work on a flat copy that is padded with zeros up
# to the next multiple of R; zeros do not change a sum. What is left after the all-gather is to cut
# the padding off, and to copy the numbers into `tensor`, whatever its shape.
#
# </details>

# %%
hierarchical = lab.measure_hierarchical(hierarchical_all_reduce)
lab.show_hierarchical(hierarchical)

# %% [markdown]
# **Notice:** S in place of 1.5 S, counted, and fewer seconds on both links. The bars are longer than
# their ticks by what gloo needs inside the host, where its reduce-scatter is an all-reduce. That time
# is the CPU's, and does not shrink with the link's: on a fast enough link, with gloo, the gain is lost.

# %% [markdown]
# On GPUs the inside is NVLink, and NCCL has a real reduce-scatter. So this is what it would take, by
# your formula, for the gradients of 7B parameters in 16 bits on two hosts of 8 H100s: first with a card
# of 400 Gbit/s for each GPU, as in a training cluster, then with one for all, as on small clouds:

# %%
lab.show_on_gpus(link_seconds)

# %% [markdown]
# **Notice:** with a card for each GPU the network is almost as fast as NVLink. There your three steps, one
# after another, are *slower* than the flat ring (89 ms against 66), and only a tree that works on pieces
# at the same time is faster (54 at best). With one card a host your steps win, 334 ms against 525.

# %% [markdown]
# ## FSDP across hosts
#
# FSDP over all ranks gathers every parameter twice, through the link. **HSDP** (hybrid sharding)
# shards inside each host and keeps a replica on each: only gradients cross the link, and only each
# rank's shard of them. The price is memory: a rank keeps 1/R, not 1/N.

# %% [markdown]
# Whether that pays depends on the link: first measure it on a slow one.
#
# Guess: on a slow link on which FSDP's step takes 1.1 s, how many seconds does HSDP's take?

# %%
# A guess, for exercise 6.7
### BEGIN SOLUTION
my_guess = 0.5
### END SOLUTION
labs.guess("6.7", "seconds of a step of HSDP", my_guess)

# %% [markdown]
# | Call | does |
# |:--|:--|
# | `init_device_mesh("cpu", (a, b), mesh_dim_names=(...))` | lays all ranks out in `a` rows of `b` neighbours |
# | `fully_shard(module, mesh=mesh)` | on a 2-D mesh: replicates over its first dimension, shards over its second |
# | `lab.blocks(model)` | the model's blocks |
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
    for block in lab.blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    ### END SOLUTION


# %%
lab.check_hybrid_shard(hybrid_shard)

# %% [markdown]
# <details><summary>Hint</summary>
#
# How many ranks does a host have? The mesh has one row for each host, so that neighbours in a row are
# ranks of the same host. With the two dimensions exchanged everything trains as well, but the shards
# of a layer lie on different hosts.
#
# </details>

# %% [markdown]
# DDP, ZeRO-3, FSDP and your HSDP train the same model on a link of 50 Mbit/s, in turns. FSDP keeps its
# root, which has half of this model, from forward to backward (notebook 04); ZeRO-3 gathers it twice.

# %%
training = lab.measure_training(hybrid_shard)
lab.show_training(training)

# %% [markdown]
# **Notice:** the order of the seconds is that of the bytes. ZeRO-3 sends three times what HSDP sends,
# and takes more than twice as long; FSDP saves one gather of its root. DDP sends half as much again as
# HSDP, and keeps twice its parameters. ZeRO-3 and FSDP are above their ticks, because gloo's
# reduce-scatter is an all-reduce. With NCCL ZeRO-3 would be on it, 2.25 S, still more than twice
# HSDP's S.

# %% [markdown]
# ## Which strategy for which cluster?
#
# Model states take 16 bytes for each parameter (2 + 2 + 12, mixed precision). What travels, S, has 2
# bytes for each. With H hosts of R GPUs, N = H·R:
#
# | | states on a GPU | seconds of a step's collectives |
# |:--|:--|:--|
# | DDP | all | 2(N-1)/N · S over the slowest link |
# | HSDP | 1/R | 3(R-1)/R · S inside, and then 2(H-1)/H · S across |
# | FSDP | 1/N | 3(N-1)/N · S over the slowest link |

# %% [markdown]
# The slowest link of a ring is the slowest that it passes: `across` if there are several hosts, and
# `inside` if a host has several GPUs. `across` is all cards of a host together, because NCCL's rings and
# trees *[use them all at once](https://github.com/NVIDIA/nccl/issues/530)*.
#
# ### Exercise 6.8 · The rule
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
# "The first one that fits" is the usual rule, and often wrong: DDP may fit and still put more on a slow
# link than HSDP. "HSDP between hosts" is another, and wrong where the network is fast. So first write down what each strategy keeps on a GPU, and its seconds, in two
# dictionaries with the same keys. Then drop those that keep more than `memory`, and take the fastest
# of the rest.
#
# </details>

# %%
lab.show_choice(choose_strategy)

# %% [markdown]
# **Notice:** in a training cluster, with a card for each GPU, the network is hardly slower than NVLink:
# the strategy with the fewest bytes wins, DDP where it fits, FSDP where not. HSDP pays where the link is
# slow: on two hosts with one card, S between them in place of 1.9 S for DDP. On 16 hosts 2(H-1)/H is
# almost 2(N-1)/N, and that gain is gone. 70B needs 16 hosts, and 10 Gbit/s make it hopeless.

# %% [markdown]
# The rule counts bytes only. A ring over N ranks also has N-1 steps, each with a latency, and a large
# cluster's switches may carry less than all cards together. Both speak for HSDP on many hosts, and only a
# measurement there can say how much.
# %% [markdown]
# ## What limits it
#
# "Our cluster reaches 200 TFLOP/s per GPU." Is that much? An H100's data sheet says 1,979, so a tenth;
# its dense peak is 989.5, so a fifth; and if a third of the work was done twice, less than that. A
# number of FLOP/s means something only with three definitions beside it.
#
# *The second sitting begins here. In a new kernel, run the first cell, and exercise 6.3's: its function
# is used again.*

# %% [markdown]
# | | |
# |:--|:--|
# | **6ND** | 6 FLOPs for each of N parameters and D tokens: 2 in forward, 4 in backward |
# | attention | 12·L·h·s more for each token: L layers of width h, sequences of s tokens |
# | **MFU**, model FLOPs utilization | FLOPs that the model needs, per second, as a share of the peak |
# | **HFU**, hardware FLOPs utilization | the same with what is computed again |

# %%
run = lab.reported_run("mosaic-036")
run

# %% [markdown]
# | What | is |
# |:--|:--|
# | `run.parameters`, `.vocabulary`, `.tied` | all parameters; tokens that the model knows; whether head and embedding are one matrix |
# | `run.layers`, `.hidden`, `.sequence` | L, h and s |
# | `run.gpus`, `.tokens_per_s` | their number; tokens per second of all of them together |
# | `run.sheet_tflops`, `.sparse` | what the data sheet prints for one GPU; whether that is with sparsity, twice the dense rate |

# %% [markdown]
# N counts only what is *multiplied*. The head is a product with `vocabulary × hidden` parameters. If
# the model is `tied`, the embedding is the same matrix. If not, it is a second one that is only looked
# up: leave it out. A rate "with sparsity" is for matrices of which half the elements are zero; yours
# are dense.

# %% [markdown]
# 12·L·h·s counts every pair of tokens, also the masked half. A causal FlashAttention kernel skips almost
# all of that half, so it computes about 6·L·h·s. *[PaLM's MFU](https://arxiv.org/abs/2204.02311)* (appendix
# B) counts all pairs, and so do the runs below and you; before you compare two MFUs, ask how each counts.

# %% [markdown]
# ### Exercise 6.9 · FLOPs, MFU and HFU
#
# *Difficulty 3 of 5 · 15 minutes · target: the MFU that published runs print, and runs drawn at random*
#
# `run.recompute` is `"none"`, `"selective"` (attention's forward runs again in backward) or `"full"`
# (all of forward does). Forward is a third of forward and backward.

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
# A share is FLOPs per token × tokens per second of *one* GPU / FLOP/s of one GPU. So first bring all
# three to one token, one GPU and one second.
#
# Outline: (1) 6 × the parameters that are multiplied; (2) attention's 12·L·h·s on top; (3) the peak in
# FLOP/s, dense; (4) MFU from 2 and 3; (5) HFU: what runs again is a third of attention, a third of
# everything, or nothing.
#
# </details>

# %% [markdown]
# And this machine? No data sheet says what a processor's peak is, so the lab measures one: a large
# fp32 product of matrices, on one core (on a GPU: on that GPU). Then it trains a small GPT-2 there.

# %%
own = lab.own_run()
own

# %%
lab.show_utilization(utilization, own)

# %% [markdown]
# **Notice:** at 32,768 tokens most of the counted FLOPs are attention's: with 6N alone, the MFU is less
# than half of the printed one, and without the masked half it is 22 % in place of 31 % (H100). And a run
# that recomputes everything can be called 54 % (HFU) or 40 % (MFU), or 20 % against the sparse rate.

# %% [markdown]
# ## The efficiency equation, as a model that can be wrong
#
# MFU says how much is lost, not to what. A model says it: a step computes (products and attention, at a
# share of the peak; norms and activations, at the memory's bandwidth), and it communicates. Each
# collective runs beside some computing. Only what computing does not hide lengthens the step.

# %%
parts = lab.step_parts("mosaic-010")
parts

# %% [markdown]
# These are parts of a published run: MPT-7b, 512 H100. `parts.computing` is a dictionary of seconds.
# `parts.communication` is one of collectives, each with `seconds` and with `beside`: the seconds of
# computing at the same time. While *both* run, NCCL's kernels take multiprocessors and bandwidth from
# the computation: of these seconds, the share `parts.interference` lengthens the step after all.

# %%
sent = parts.communication["gathered and reduced in backward"]
print(f"{sent.seconds:.3f} s sent beside {sent.beside:.3f} s of computing")
print(f"computing {sum(parts.computing.values()):.3f} s; the published step took 1.271 s")

# %% [markdown]
# Guess first: take 6N FLOPs, the dense peak, and one MFU for all runs, as most estimates do. What is its
# mean error, in percent, on published runs above 8k tokens?

# %%
# A guess, for exercise 6.10
### BEGIN SOLUTION
my_guess = 30
### END SOLUTION
labs.guess("6.10", "mean error of 6N at one MFU above 8k tokens, in %", my_guess)

# %% [markdown]
# ### Exercise 6.10 · A step from its parts
#
# *Difficulty 3 of 5 · 10 minutes · target: right for synthetic steps; mean error at most 6 % on 134
# published runs, also where computing could hide over a tenth of the step*

# %%
# Exercise 6.10: the seconds of a step
def step_seconds(parts):
    """Seconds: all computing, and of each communication what lengthens the step."""
    ### BEGIN SOLUTION
    seconds = sum(parts.computing.values())
    for sent in parts.communication.values():
        hidden = min(sent.seconds, sent.beside)
        seconds += sent.seconds - hidden + parts.interference * hidden
    return seconds
    ### END SOLUTION


# %%
lab.check_step_seconds(step_seconds)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Draw one collective as a bar above the computing beside it. Where the two bars overlap, the time is
# hidden; where the upper one is longer, it is exposed. How long is the overlap if one bar is shorter
# than the other?
#
# Outline: (1) add up computing; (2) for each collective by itself, find the overlap; (3) add the rest in
# full, and of the overlap the share that comes back.
#
# </details>

# %%
lab.show_step_times(step_seconds)

# %%
lab.show_step_errors(step_seconds)

# %% [markdown]
# **Notice:** from left to right each column leaves less out, though not each error falls. Above 8k,
# one MFU without attention predicts less than half of the time of most steps. Up to 2k, communication
# makes the difference. But "nothing hidden" is hardly worse than yours: in most of these runs computing
# could hide little. So sort them by how much it could:

# %%
lab.show_overlap(step_seconds)

# %% [markdown]
# **Notice:** where computing could hide over a fifth of the step, both extremes fail, although their
# other constants were fitted for them: 7 % off if nothing is hidden, 13 % if hiding costs nothing, 4 %
# with yours. Below a fifth, the data cannot tell yours from no overlap at all. And `interference` is a
# constant that six runs of one library decide, not a measurement of a GPU: on yours, measure it.

# %% [markdown]
# Is that a fit or a prediction? Rates that no data sheet gives are seven constants, for all runs
# together: what share of the peak a product reaches, for example. Each run is predicted with constants
# fitted *without* it and its neighbours. The same test for a file of your own is
# `scripts/bench steptime --rows FILE`. And the model *is* wrong somewhere: the picture names where.
# %% [markdown]
# ## Accelerate, Qwen2, DeepSpeed
#
# Qwen2-7B has 7.6 billion parameters: 122 GB with AdamW, so it must be sharded. A course's last
# exercise says: fine-tune it "with Accelerate and FSDP". That script starts on any machine, and its
# loss falls. But was anything sharded? If not, it fails on the model that needs it, or it pays eight
# GPUs for the work of one.

# %%
lab.write_script("finetune.py")

# %% [markdown]
# **Accelerate** wraps what your script makes: `prepare` returns model, optimizer and loader as the
# configuration asks for. `accelerate launch` reads that configuration from a YAML file, and starts the
# ranks by torchrun. The Qwen2 here is small, has random weights, and its embedding is tied to its head.
# `--model Qwen/Qwen2-0.5B` takes real weights, where the hub answers.

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
# Look at the line that the script printed. How often is it there, and which world size does it name?
# The script also wrote what each rank *did* in its last step: its collectives, and the bytes
# that it held when backward was done, beside those of one whole copy.

# %%
fine_tuned = lab.read_job(launched)
fine_tuned

# %% [markdown]
# Accelerate uses a CPU only if it is told to, `Accelerator(cpu=True)`: that is the script's `--cpu`.
# `--shard` sets a private variable of Accelerate to FSDP, as it does itself on GPUs. The next cell
# starts the script in three ways, as torchrun would: on one process with `--cpu`, on two, and on two with
# `--shard` too.
#
# Guess: with `--cpu`, how many whole copies of the parameters do two ranks hold together?

# %%
# A guess, for exercise 6.11
### BEGIN SOLUTION
my_guess = 2
### END SOLUTION
labs.guess("6.11", "copies of the parameters that two ranks hold with --cpu", my_guess)

# %%
jobs = lab.start_otherwise("finetune.py", fine_tuned)
jobs

# %% [markdown]
# That is what the library calls itself. Your function judges by evidence. `ranks` is a list with one
# record per rank:
#
# | What | is |
# |:--|:--|
# | `rank.calls` | the collectives of a step, with `kind` and logical `bytes`; every rank has the same |
# | `rank.held[part]` | bytes that this rank held; part is "parameters", "gradients" or "optimizer_state" |
# | `rank.whole[part]` | bytes of one whole copy |

# %% [markdown]
# | Name | of N ranks together |
# |:--|:--|
# | "one process" | N is 1 |
# | "separate" | gradients are never added up: N models, each trained alone |
# | "DDP" | gradients are added up; N copies of all three parts |
# | "ZeRO-1", "ZeRO-2" | about 1 copy of the optimizer state; and of the gradients |
# | "ZeRO-3" | about 1 copy of all three. FSDP is ZeRO-3: no measurement tells them apart |
#
# Copies are not exact: shards are padded, may be uneven, and some gradients may be missing.

# %% [markdown]
# ### Exercise 6.11 · What ran?
#
# *Difficulty 3 of 5 · 20 minutes · target: the right name for 69 jobs, recorded on real ranks or drawn at
# random, on 1 to 16 ranks*
#
# "reduced" is the bytes of rank 0's `all_reduce`, `reduce_scatter` and `reduce`, in multiples of a whole
# copy of the gradients.

# %%
# Exercise 6.11: what a job was, from what its ranks sent and held
def what_ran(ranks):
    """(name, {"parameters": copies, "gradients": ..., "optimizer_state": ..., "reduced": ...})"""
    ### BEGIN SOLUTION
    N, whole = len(ranks), ranks[0].whole
    copies = {part: sum(rank.held[part] for rank in ranks) / whole[part] for part in whole}
    sharded = sum(number < (1 + N) / 2 for number in copies.values())
    reduced = sum(call.bytes for call in ranks[0].calls if call.kind in (
        "all_reduce", "reduce_scatter", "reduce")) / whole["gradients"]
    name = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")[sharded]
    if N == 1 or reduced < 0.5:
        name = "one process" if N == 1 else "separate"
    return name, {**copies, "reduced": reduced}
    ### END SOLUTION


# %%
lab.check_what_ran(what_ran)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Add up what all ranks hold, and divide by one whole copy. The result is near 1 or near N: which
# number lies between, for every N? Memory says what is sharded. Collectives alone cannot: DeepSpeed's
# ZeRO-1 all-reduces too. But only they tell N ranks that train one model from N ranks that train a
# model each. A loss that is averaged for printing is an all-reduce of 4 bytes.
#
# </details>

# %%
lab.show_jobs(jobs, what_ran)

# %% [markdown]
# **Notice:** on a CPU the FSDP script was never FSDP by itself. As launched, each rank trains a model of
# its own. With `--cpu` it is DDP: one all-reduce of all gradients, nothing sharded, no warning. Only with
# `--shard` the ranks hold one copy together, although the library still calls itself MULTI_CPU. On GPUs
# the first line is FSDP.

# %% [markdown]
# ## Which engine?
#
# **DeepSpeed** is the library that ZeRO came with. `deepspeed.initialize(model=..., config=...)`
# returns an *engine*; you call `engine.step()` in place of the optimizer. The stage is one number in
# its configuration, and most other numbers there are sizes of buckets.

# %%
print(lab.deepspeed_json(stage=2))

# %% [markdown]
# Accelerate's FSDP is `fully_shard`, so memory and traffic are those of 04; 03's last picture has
# DeepSpeed's three stages. Its stage 1 is ZeRO-2 when backward is done: it drops gradients that other
# ranks keep as soon as they are reduced, and differs from stage 2 only while gradients of several
# batches are added up. Stages 1 and 2 all-reduce, so they send as much as FSDP2.

# %% [markdown]
# So choose by what must fit: DDP if 16 bytes for each parameter, its buckets and the activations do;
# FSDP2 if not, in plain torch or by Accelerate; DeepSpeed if you need what only it has, such as states
# on NVMe. And Accelerate's launcher is not only for its own scripts: `accelerate launch train.py`
# starts yours unchanged, because it joins the process group by itself, from the variables that every
# launcher sets.

# %% [markdown]
# ## What it costs
#
# In the offers below, an H100 for an hour costs between 2.69 and 6.88 dollars, and other sellers ask
# more or less. Whether the more expensive machine is worth it depends on what it trains in that hour.
# So compare machines by **tokens per dollar**, from measured throughput.

# %%
MACHINES = lab.price_table()  # or lab.price_table({"Lambda 1x A10": 0.75}), or a JSON file
lab.show_prices(MACHINES)

# %%
machine = MACHINES["Lambda 8x A100-80"]
machine

# %% [markdown]
# These are offers of three sellers, copied from their pages by public repositories that the last column
# names: look up yours before you pay. A price that you pass replaces the table's. `machine.dollars` is
# per GPU and hour on demand, `machine.gpus` is how many GPUs it has.
#
# Guess first: what does a billion tokens cost on that machine, for a model of 1.3B parameters?

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
# **Notice:** the most expensive of these offers costs 2.8 times the cheapest, but an A100-80 and an H100
# of one seller never differ by more than 1.6. Your own machine is marked with the FLOP/s that it reached
# in 6.9: cheap hours are not always cheap tokens.

# %% [markdown]
# Two budgets, worked out with your function. For the A100s there are published speeds. For the A10 there
# is none, so its MFU is an assumption: change it.

# %%
lab.show_budget(costs, mfu=0.3, machines=MACHINES)

# %% [markdown]
# **Notice:** the Chinchilla rule asks for 20 tokens per parameter. An evening on two A10s is enough for
# half of them in a GPT-2, and an hour on eight A100s for more than all. A model ten times as large gets
# half a token per parameter in the same hour.

# %% [markdown]
# ## A slip of a thousand
#
# Exponents are often written out as words, and a word is easily one too low. An example, made up for this
# exercise: *"Training 7B parameters on 2T tokens takes 84 quintillion FLOPs."* `lab.SCALES` lists the
# names of numbers, each 1,000 times the one before it: thousand, million, billion and so on.

# %%
print(lab.SLIP)
claim = lab.SLIP
print(claim.number, claim.scale, claim.parameters, claim.tokens)
lab.SCALES

# %% [markdown]
# ### Exercise 6.13 · How far off?
#
# *Difficulty 2 of 5 · 10 minutes · target: the factor, and the real days and dollars*

# %%
# Exercise 6.13: a printed number of FLOPs, and what the job really takes
def judge_claim(claim, machine, peak, mfu):
    """(6ND / printed FLOPs, days, dollars); peak: dense FLOP/s of one GPU."""
    ### BEGIN SOLUTION
    flops = 6 * claim.parameters * claim.tokens
    printed = claim.number * 1000 ** (1 + lab.SCALES.index(claim.scale))
    hours = flops / (machine.gpus * peak * mfu) / 3600
    return flops / printed, hours / 24, hours * machine.gpus * machine.dollars
    ### END SOLUTION


# %%
lab.check_claim(judge_claim)

# %%
lab.show_claim(judge_claim)

# %% [markdown]
# **Notice:** believed, the slip makes a job of years look like one of a day. Check a number of FLOPs by
# its days: they are easier to doubt than its zeros.

# %% [markdown]
# ## Spot
#
# A **spot** machine costs less because its seller may take it back at any moment. An **interruption**
# loses what was trained since the last checkpoint, half an interval on average, and the restart is
# billed too. So how many interruptions may come before on demand is cheaper?

# %% [markdown]
# On 6 August 2026 an AWS p5en cost 7.91 dollars per GPU and hour on demand, and 3.40 on spot. Guess: with
# a checkpoint every half hour and restarts of 6 minutes, at how many interruptions an hour is that even?

# %%
# A guess, for exercise 6.14
### BEGIN SOLUTION
my_guess = 3
### END SOLUTION
labs.guess("6.14", "interruptions an hour at break-even", my_guess)

# %% [markdown]
# To first order, billed hours are hours · (1 + rate·lost), with lost = interval/2 + restart. But what is
# trained again can be interrupted again, and so can a restart. If interruptions come independently of
# each other, the exact mean is known (Daly, 2006, equation 20), with `save` the hours of a save and
# `mtbf` the mean hours between interruptions:

# %%
lab.expected_wall(work=100, interval=0.5, save=0, restart=0.1, mtbf=1)  # billed hours

# %% [markdown]
# ### Exercise 6.14 · Spot with interruptions
#
# *Difficulty 3 of 5 · 15 minutes · target: dollars within 4 % of an event simulation, the break-even rate
# within 3 % of the exact one*
#
# Interruptions come at any moment, `rate` of them in a *billed* hour. Checkpoints are `interval` hours
# apart, and take no time. Prices are per hour. The checked cases have on_demand / spot near 1.3.

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
# Dollars are billed hours × price. At break-even, the billed hours on spot are as many times the training
# as on demand is more expensive: solve for the rate.
#
# No formula solves the exact mean for the rate. But dollars grow with the rate. So begin with a rate at
# which spot pays and one at which it does not, and halve the interval between them until it is narrow.
# (Or find a formula that is close: what is 1 + x if x itself grows by its own share, again and again?)
#
# </details>

# %%
lab.show_spot(spot_costs, MACHINES["AWS p5en.48xlarge"])

# %% [markdown]
# **Notice:** with a checkpoint every half hour, spot pays until it is interrupted 2.26 times an hour; with
# one every three hours, until 0.39 times. The dotted first-order line is right only where little is
# lost: its break-even rates are 68 % too high. hours / (1 - rate·lost), the other short formula, is 28 %
# too low. Notebook 08 asks how often to save.
# %% [markdown]
# ## Written down
#
# In a month you will ask: was the efficiency 78 or 87 percent, on which torch, with which batch? A
# number without its machine and its versions cannot be compared with anything. So the last step of a
# measurement is to write it down, by code.

# %%
record = lab.document()
record

# %% [markdown]
# The folder has a `README.md` with the tables and pictures made since the kernel started, the traces,
# and `numbers.json` with every number, the machine and the versions. (In JupyterLab, right-click the
# opened page for *Show Markdown Preview*.) A second record of a day gets a folder of its own. Read
# back, with the number of each topic that is furthest from its prediction:

# %%
lab.show_record(record)

# %% [markdown]
# **Notice:** a number without a prediction is hard to doubt. Where there was one, the largest error says
# what to measure again, or which formula left something out.

# %% [markdown]
# `papers.md` in the same folder has ten questions on the ZeRO and FSDP papers, with the sections that
# answer them. Below each stand the numbers that *you* measured on it, or a blank line. Two sentences per
# question are enough: they are yours, and no check reads them.

# %% [markdown]
# ## Outgrown this machine?
#
# Your `train.py` finds all it needs in its environment. So only what *starts* it changes, when it
# moves to more hosts. The folder `scripts/cluster` has a file for each:
#
# | File | Starts your script on |
# |:--|:--|
# | `torchrun-hosts` | hosts that you can log in to |
# | `train.sbatch` | a cluster with Slurm |
# | `sky.yaml` | rented nodes, with SkyPilot |
# | `ray_train.py` | a Ray cluster |

# %% [markdown]
# Slurm, for example, gives each job a number and a list of nodes. The file makes of them what
# `torchrun` wants to know, and starts one `torchrun` on each node:

# %%
print(lab.cluster_file("train.sbatch"))

# %% [markdown]
# ```sh
# sbatch --nodes=4 --gpus-per-node=8 scripts/cluster/train.sbatch train.py --epochs 2
# ```
#
# | Who starts the ranks | fits |
# |:--|:--|
# | `torchrun` on each host | a few hosts of your own |
# | Slurm | a fixed cluster that many people share |
# | Kubernetes with Kubeflow Trainer | where everything else runs on Kubernetes already |
# | Ray Train | Python programs of which training is one part |
# | SkyPilot | rented nodes, spot, or several clouds |
#
# What each costs you, and what breaks first, is in `scripts/cluster/README.md`. None of them makes a
# step faster.
# %% [markdown]
# ## Optional: a job from a blank page
#
# 7B parameters with AdamW in fp32 are 112 GB of states: too much for a GPU of 80 GB. FSDP over 64 GPUs
# leaves 1.75 GB on each, but every all-gather crosses the link between hosts. HSDP on 8 hosts of 8 GPUs
# leaves 14 GB; only gradients cross. So a job chooses by an option. Mistakes are quiet: with a mean
# of means the loss falls too.

# %% [markdown]
# Now write such a job. Its dataset is ragged, as in exercise 6.2:

# %%
rows = lab.answer_samples(3, seed=0)  # sequences of 32 tokens
rows[0]["labels"]

# %% [markdown]
# | Call | returns |
# |:--|:--|
# | `models.gpt2(layers, hidden, seed=s)` | the model, the same on each rank |
# | `answer_samples(number, seed)` | so many sequences: dictionaries, of which a `DataLoader` makes batches |
# | `count_answers(batch)`, `loss_sum(module, batch)` | as in exercise 6.2 |
# | `torch.nn.utils.clip_grad_norm_(parameters, most)` | the norm of all gradients before clipping; of sharded ones a DTensor, whose `.full_tensor()` has the number |

# %% [markdown]
# | Option | is |
# |:--|:--|
# | `--samples`, `--batch`, `--epochs`, `--seed`, `--layers`, `--hidden` | as in `train.py` |
# | `--accumulate` | micro-batches of a rank in each step |
# | `--clip` | the largest norm of all gradients together, a float |
# | `--replicas` | 1: FSDP; R: HSDP with R replicas, on a 2-D mesh |
# | `--metrics` | rank 0's file: `{"ranks": N, "steps": [{"loss": ..., "tokens": ..., "norm": ...}, ...]}` |

# %% [markdown]
# ### Exercise 6.15 · `job.py`
#
# *Difficulty 5 of 5 · 60 minutes · target: on 2 and 2 × 2 ranks a half of the parameters on each, and the
# reference's losses, norms and clipped gradients*
#
# AdamW with a learning rate of 1e-3; the blocks and the whole model are units. "loss" is the mean over
# the answer tokens of a step on *all* ranks, "norm" is before clipping. The samples always divide by
# ranks × batch × accumulate. The names are a proposal; delete at will.

# %%
lab.write_script("job.py")

# %% [markdown]
# <details><summary>Hint</summary>
#
# Which numbers need all ranks? The tokens before the first backward; the loss and the norm after the
# last. FSDP divides gradients by the number of *all* ranks, also on a 2-D mesh: what must each loss be
# multiplied by?
#
# Outline: (1) options; (2) group and device, as in `train.py`; (3) a mesh of (replicas, ranks of a
# replica), from which FSDP takes the second dimension alone; (4) blocks, root, optimizer; (5) epochs, in
# them groups of `--accumulate` micro-batches; (6) in a step: tokens, backwards, clip, step, zero; (7) rank
# 0 writes.
#
# </details>

# %%
lab.check_job("job.py")

# %%
job = lab.torchrun("job.py", "--samples", 96, "--clip", 1, ranks=2)
job

# %%
lab.show_job(job)

# %% [markdown]
# **Notice:** the norms in the table are above 1, so these steps were clipped to a norm of 1. Had each
# rank clipped by the norm of its own shards, each shard would have had a norm of 1 and both together
# of √2; on 64 ranks it would be 8. The loss would have fallen, and no log would have shown it.

# %% [markdown]
# ## I can …
#
# - write a script that any launcher starts, and say which samples each rank sees in each epoch
# - compute the loss of ragged batches so that every token counts once
# - tell a speed-up from an efficiency, and lost time by its causes
# - predict the bytes and seconds of an all-reduce between hosts to 10 %
# - build a hierarchical all-reduce, and say when HSDP is worth its memory
# - compute MFU against the dense peak, and dollars per billion tokens

# %% [markdown]
# ## How it usually goes wrong
#
# - **No `set_epoch`**: every epoch has the same order, and nothing complains.
# - **A mean of means**: ranks with few answer tokens weigh too much.
# - **The sparse peak**: it halves every MFU.
# - **Trusting a config file**: what ran is what the traffic shows.
# - **A flat ring over one slow card a host**: that card carries almost 2 S.

# %% [markdown]
# ## What to read
#
# | read | by | a question |
# |:--|:--|:--|
# | [torchrun](https://docs.pytorch.org/docs/stable/elastic/run.html) | PyTorch | Which variables does it set for each rank? |
# | [PyTorch FSDP](https://arxiv.org/abs/2304.11277) | Y. Zhao et al., VLDB 2023, section 3.2.2 | Which bytes of hybrid sharding cross hosts? |
# | [PaLM](https://arxiv.org/abs/2204.02311) | A. Chowdhery et al., 2022, appendix B | Why does MFU leave recomputation out? |
# | [Reducing activation recomputation](https://arxiv.org/abs/2205.05198) | V. Korthikanti et al., 2022, section 6 | Where do MFU and HFU differ most? |

# %% [markdown]
# ## What comes next
#
# Notebook **07a Tensor parallel**: what to shard when a layer, or a sequence, is too large for data
# parallelism. After it, 07b shards the model's depth, and notebook 08 survives failures.
