# %% [markdown]
# # 07b · Pipeline parallelism and 3D parallelism
#
# | In short | This notebook |
# |:--|:--|
# | **Time** | 260 minutes in three sittings (95 + 65 + 100), 20 more for optional parts |
# | **Needs** | any machine with 2 cores; no GPU |
#
# Tensor parallelism stays inside the NVLink domain. Across nodes, each rank gets complete layers
# instead: a pipeline. Here you write pipeline schedules, execute them on ranks, and combine data,
# pipeline and tensor parallelism.

# %% [markdown]
# <details><summary>On a CPU</summary>
#
# The order of the actions, the messages and the memory of each rank are those of a GPU node. Two cores
# cannot compute for four ranks at once. So in a measured timeline each action has a minimum duration:
# the order and the idle times are real, the milliseconds are not a GPU's.
#
# </details>

# %% [markdown]
# ## You will be able to
#
# After the first sitting (7.14–7.17, 95 minutes):
#
# - write the schedules GPipe, 1F1B, interleaved 1F1B and ZB-H1;
# - compute the bubble and the peak of activations of each schedule;
# - say which definition of the bubble a paper uses.

# %%
import functools
import math
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import labs
import labs.pipeline_parallel as lab
from labs.pipeline_parallel import B, F, W

labs.warm_up()

# %% [markdown]
# ## Pipeline stages and micro-batches
#
# Tensor parallelism all-reduces four times in every layer, so it stays inside a node. With **pipeline
# parallelism** each rank has a **stage**: some consecutive layers. Only the hidden states (the residual stream) cross
# from one stage to the next, as values in forward and as gradients in backward. How many bytes is
# that? The cell computes it for GPT-3 with 8 stages, one sequence and 16-bit numbers.

# %%
layers, s, h = 96, 2048, 12_288
stream = 2 * s * h  # bytes of the residual stream
print(f"between two stages, forward and backward: {2 * stream / 1e6:,.0f} MB")
print(f"all-reduced by tensor parallelism in a stage: {layers // 8 * 4 * stream / 1e6:,.0f} MB")

# %% [markdown]
# But a stage must wait for the stage before it. With a single batch, one rank computes while all others
# are idle. So the batch is split into m micro-batches. A **schedule** gives the order of the actions of
# each rank: `F(i)` is the forward of micro-batch i, `B(i)` its backward. Sends and receives are not
# listed: a rank waits until its input has arrived.
#
# Here two ranks train on two micro-batches. The first list is rank 0's.

# %%
lab.show_schedule([[F(0), F(1), B(0), B(1)], [F(0), B(0), F(1), B(1)]], micro_batches=2)

# %% [markdown]
# A forward takes one *slot*. A backward takes two, because it computes two matrix products for each one
# of the forward. The grey time is the **bubble**: there a rank computes nothing.
# (The next section explains the bars on the right.)
#
# Some orders deadlock. The next cell swaps the two lists, and the lab names the first action that
# can never run.

# %%
print(lab.why_illegal([[F(0), B(0), F(1), B(1)], [F(0), F(1), B(0), B(1)]], micro_batches=2))

# %% [markdown]
# ## GPipe
#
# p ranks train on m micro-batches. **GPipe** is the simplest schedule that lets all ranks compute: first
# all forwards, then all backwards. It still has a bubble: at the beginning the first micro-batch
# must reach the last rank, and at the end the last gradient must come back to the first rank.
#
# Guess: with 4 ranks and 8 micro-batches, for what percentage of the step is a rank idle?

# %%
# A guess, for exercise 7.14
### BEGIN SOLUTION
my_guess = 27
### END SOLUTION
labs.guess("7.14", "% of the step that a rank is idle, GPipe, p = 4, m = 8", my_guess)

# %% [markdown]
# ### Exercise 7.14 · GPipe
#
# *Difficulty 2 of 5 · 12 minutes · target: 3(m + p − 1) slots, and the peak of any list of actions*
#
# `gpipe(ranks, micro_batches)` returns the schedule: a list with one list of actions for each rank. It
# must work for any numbers, also for fewer micro-batches than ranks. Micro-batches count from 0.

# %%
# Exercise 7.14: all forwards, then all backwards
def gpipe(ranks, micro_batches):
    ### BEGIN SOLUTION
    forwards = [F(i) for i in range(micro_batches)]
    backwards = [B(i) for i in range(micro_batches)]
    return [forwards + backwards for _ in range(ranks)]
    ### END SOLUTION

# %% [markdown]
# What a forward saves stays in memory until the backward of the same micro-batch: until then the
# micro-batch is **in flight**. `peak_in_flight` gets the actions of one rank, in their order. How many
# micro-batches are in flight at the same time, at most? `action.kind` is "F" or "B".

# %%
# Exercise 7.14, continued: the peak of one rank
def peak_in_flight(actions):
    ### BEGIN SOLUTION
    in_flight = peak = 0
    for action in actions:
        in_flight += 1 if action.kind == "F" else -1
        peak = max(peak, in_flight)
    return peak
    ### END SOLUTION

# %%
lab.check_gpipe(gpipe, peak_in_flight)

# %%
lab.show_schedules(gpipe, ranks=4, micro_batches=8)

# %% [markdown]
# **Notice:** every rank is idle for 3(p − 1) slots, whatever m is.
#
# So the bubble is (p − 1)/(m + p − 1) of the complete step. Megatron-LM's
# *[paper](https://arxiv.org/abs/2104.04473)* quotes (p − 1)/m: the same bubble, divided by the step
# without it. More micro-batches make both numbers smaller.

# %% [markdown]
# ## 1F1B
#
# GPipe has all m micro-batches in flight. What does that cost for GPT-3 with 8 stages, whose layers are
# also sharded by tensor and sequence parallelism over 8 GPUs of 80 GB? The table multiplies the peak that
# your function finds by the bytes of one micro-batch.

# %%
activations = layers // 8 * 34 * s * h / 8  # 34·s·b·h bytes a layer (notebook 01), sharded by 8
lab.show_activations(peak_in_flight, gpipe, ranks=8, activation_gb=activations / 1e9)

# %% [markdown]
# The 64 micro-batches that make the bubble small take 82 GB, and model states are not yet counted. (An
# A100 of 80 GB has 85.1 GB, of which CUDA and NCCL take about 2.5.)

# %% [markdown]
# But the last rank could run the backward of micro-batch 0 at once, and then the rank before it could,
# and so on. In **1F1B** (one forward, one
# backward) a rank alternates forward and backward as soon as its first gradient has arrived.
#
# Guess: how many micro-batches does rank 0 have in flight at its peak, with 4 ranks and 8
# micro-batches?

# %%
# A guess, for exercise 7.15
### BEGIN SOLUTION
my_guess = 4
### END SOLUTION
labs.guess("7.15", "micro-batches in flight on rank 0, 1F1B, p = 4, m = 8", my_guess)

# %% [markdown]
# ### Exercise 7.15 · 1F1B
#
# *Difficulty 3 of 5 · 15 minutes · target: 3(m + p − 1) slots, and no rank has more than p micro-batches
# in flight*
#
# The lists of the ranks now differ. Each list begins with some forwards, the *warm-up*. Then F and B
# alternate. The list ends with the remaining backwards, the *cool-down*. With fewer micro-batches than
# ranks, some ranks never alternate.

# %%
# Exercise 7.15: one forward, one backward
def one_f_one_b(ranks, micro_batches):
    ### BEGIN SOLUTION
    schedule = []
    for rank in range(ranks):
        warm_up = min(ranks - 1 - rank, micro_batches)
        actions = [F(i) for i in range(warm_up)]
        for i in range(micro_batches - warm_up):
            actions += [F(warm_up + i), B(i)]
        schedule.append(actions + [B(i) for i in range(micro_batches - warm_up, micro_batches)])
    return schedule
    ### END SOLUTION

# %%
lab.check_one_f_one_b(one_f_one_b)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Begin with the last rank: it needs no warm-up, because it computes its first gradient itself. The
# rank before it must send one more micro-batch before a gradient comes back.
#
# For each rank, count the forwards of its warm-up, at most m. List these forwards. For each
# remaining forward, list it and the earliest backward that has not run. Then list the remaining
# backwards.
#
# </details>

# %%
lab.show_schedules(gpipe, one_f_one_b, ranks=4, micro_batches=8, activation_gb=activations / 1e9)

# %% [markdown]
# **Notice:** both steps take equally long, but under 1F1B rank r has at most p − r micro-batches in
# flight, independent of m.
#
# Under GPipe every rank has m in flight. So with 1F1B you can increase m until the bubble is small
# enough:

# %%
lab.show_activations(peak_in_flight, gpipe, one_f_one_b, ranks=8, activation_gb=activations / 1e9)

# %% [markdown]
# ## Interleaved 1F1B
#
# A larger m needs a larger batch, which has a limit (notebook 06). Interleaving shrinks the
# bubble without that: split the model into v·p stages and give each rank v of them, its
# **chunks** (*virtual stages*). Stage k is on rank k mod p, so a micro-batch visits every
# rank v times. `F(i, chunk=1)` is a forward of the second chunk; it takes 1/v slot.
#
# Guess the bubble in percent for 2 chunks, 4 ranks, 8 micro-batches.

# %%
# A guess, for exercise 7.16
### BEGIN SOLUTION
my_guess = 16
### END SOLUTION
labs.guess("7.16", "% of the step that a rank is idle, v = 2, p = 4, m = 8", my_guess)

# %% [markdown]
# ### Exercise 7.16 · Interleaved 1F1B
#
# *Difficulty 5 of 5 · 30 minutes · target: 3(m + (p − 1)/v) slots; on a rank, at most Megatron-LM's
# maximum of (v − 1)p + 2p − 1 forwards whose backward has not run*
#
# m is a multiple of p. Megatron-LM's order has groups of p micro-batches. A group
# runs through chunk 0, then through chunk 1, up to the last; then the next group begins. Backwards have
# the same groups, but begin with the last chunk.

# %%
# Exercise 7.16: 1F1B with several chunks on each rank
def interleaved(ranks, micro_batches, chunks):
    ### BEGIN SOLUTION
    groups = [range(first, first + ranks) for first in range(0, micro_batches, ranks)]
    forwards = [F(i, chunk) for group in groups for chunk in range(chunks) for i in group]
    backwards = [B(i, chunk) for group in groups for chunk in reversed(range(chunks)) for i in group]
    schedule = []
    for rank in range(ranks):
        warm_up = min(2 * (ranks - 1 - rank) + (chunks - 1) * ranks, len(forwards))
        actions = forwards[:warm_up]
        for forward, backward in zip(forwards[warm_up:], backwards):
            actions += [forward, backward]
        schedule.append(actions + backwards[len(forwards) - warm_up:])
    return schedule
    ### END SOLUTION

# %%
lab.check_interleaved(interleaved)

# %% [markdown]
# <details><summary>Hint</summary>
#
# All ranks have the same order of forwards, and the same order of backwards. Only the length of the
# warm-up differs.
#
# Make the list of all forwards (for each group, for each chunk, for each micro-batch of the group) and
# the list of all backwards. The last rank's first backward is of the last chunk, so its warm-up has
# v − 1 chunks of a group. Each rank before it needs one more forward than the next rank; Megatron-LM
# takes two more, so that a rank computes while a message is in flight. Then alternate, as in 1F1B.
#
# </details>

# %%
lab.show_schedules(one_f_one_b, interleaved, ranks=4, micro_batches=8, chunks=2)

# %% [markdown]
# **Notice:** the idle time is halved.
#
# It has two costs. A micro-batch crosses vp − 1 stage boundaries instead of p − 1, so about v
# times as many bytes are sent. And more activations are in flight: on the last rank those of 2.5
# micro-batches instead of 1. (The tick "formula" marks the peak of Megatron-LM's order.)

# %% [markdown]
# ## Zero bubble: split backward
#
# For a linear layer y = xWᵀ, backward computes two gradients, of x and of W. Each is a matrix
# product as large as the forward's. The stage before waits only for the gradient of x. The gradient of
# W is not needed until the optimizer's step. The cell computes the two one after the other.

# %%
layer, x = nn.Linear(6, 4, bias=False), torch.randn(3, 6, requires_grad=True)
y = layer(x)
from_next_stage = torch.ones_like(y)
[for_stage_before] = torch.autograd.grad(y, x, from_next_stage, retain_graph=True)  # B
[layer.weight.grad] = torch.autograd.grad(y, layer.weight, from_next_stage)  # W, at any time
for_stage_before.shape, layer.weight.grad.shape

# %% [markdown]
# A **split backward** has two actions of one slot each: `B(i)` computes only the gradient of the input,
# and later `W(i)` that of the weights. (Without a W, `B(i)` computes both, as before.) In 1F1B
# W can fill idle slots: those between the last backwards of a rank, and those at its end. The cost:
# activations stay in memory until W.
#
# Guess the bubble in percent of a good split schedule that needs no more memory than 1F1B's rank 0.

# %%
# A guess, for exercise 7.17
### BEGIN SOLUTION
my_guess = 11
### END SOLUTION
labs.guess("7.17", "% of the step that a rank is idle, split backward, p = 4, m = 8", my_guess)

# %% [markdown]
# ### Exercise 7.17 · ZB-H1
#
# *Difficulty 4 of 5 · 20 minutes · target: 3m + p − 1 slots if m ≥ p, and no rank has more than p
# micro-batches in flight*
#
# Begin with `one_f_one_b(ranks, micro_batches)` and add W actions to its lists. An action has
# `action.kind`, "F", "B" or "W", and `action.micro_batch`. When should rank r run W(i)?

# %%
# Exercise 7.17: W fills the bubble
def zb_h1(ranks, micro_batches):
    ### BEGIN SOLUTION
    schedule = []
    for rank, whole in enumerate(one_f_one_b(ranks, micro_batches)):
        actions = []
        for action in whole:
            actions.append(action)
            if action.kind == "B" and action.micro_batch >= rank:
                actions.append(W(action.micro_batch - rank))
        left = range(max(0, micro_batches - rank), micro_batches)
        schedule.append(actions + [W(i) for i in left])
    return schedule
    ### END SOLUTION

# %%
lab.check_zb_h1(zb_h1)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Rank 0 is idle in the middle of the step, not at the end, and already has p micro-batches in flight. So
# it cannot delay a W. The last rank has one in flight, and is idle longest at the end. How many W can
# each of them delay to the end, if p micro-batches may be in flight?
#
# Go through the rank's 1F1B list. After each B, add the W that is delayed by as many micro-batches
# as this rank can delay. At the end, add the remaining W.
#
# </details>

# %%
lab.show_schedules(one_f_one_b, zb_h1, ranks=4, micro_batches=8)

# %% [markdown]
# **Notice:** the step is 2(p − 1) slots shorter, but all ranks have p micro-batches in flight, as only
# rank 0 had before.
#
# One part of the gain comes from the split itself: a gradient leaves a rank after one slot instead of
# two. The other part comes from the W at the end.

# %% [markdown]
# ## ZB-H2 and two definitions of the bubble
#
# The Zero Bubble *[paper](https://arxiv.org/abs/2401.10241)* has a second schedule, ZB-H2. With about
# twice the memory, no rank is idle between its first and its last action. But the last rank begins and
# ends later than the first. The paper counts the longest time of *one rank*: the next step can start on
# the early ranks while the late ones finish. Counted over the whole cluster, this stagger is idle time.

# %%
lab.show_zb_h2(zb_h1, ranks=4, micro_batches=8)

# %% [markdown]
# **Notice:** each row of ZB-H2 has no idle slot between its first and its last action, yet over the whole
# cluster its step is as long as ZB-H1's.
#
# Its bubble is zero by the paper's definition only. So check the definition of every published bubble
# rate.

# %% [markdown]
# ## Published bubble rates
#
# Is the simulation right? The paper prints measured times of F, B, W and a transfer, and the bubble rates
# of four schedules. The next cell puts these times into the simulator that has drawn your schedules. In
# it, a stage's output arrives one transfer time after the action ends, and a send blocks nobody.

# %%
lab.show_published_bubbles("6.2B")

# %% [markdown]
# By the clock of one rank, three schedules agree with the paper to four digits. ZB-H2 agrees by that
# clock only. The formulas are too low, because they leave transfers out. 1F1B-I is off by up
# to 0.002: in the authors' script only the first of p micro-batches waits for a transfer between two
# chunks of a rank. `./scripts/bench pipeline` shows all 48 cells, also with that rule.

# %% [markdown]
# ## Second sitting · 65 minutes
#
# | In short | This sitting |
# |:--|:--|
# | **Core** | 7.18, 7.19 |
# | **Optional** | 7.20 |
# | **In a new kernel** | run the cell of the imports, and those of exercises 7.15 and 7.17 |
#
# You will be able to:
#
# - execute a schedule on ranks, with the result of one process, also for micro-batches of unequal size;
# - balance stages of unequal layers;
# - use `PipelineStage` and `Schedule1F1B` of `torch.distributed.pipelining`.

# %% [markdown]
# ## Point-to-point communication between stages
#
# So far a schedule was data. Now ranks execute it. Unlike FSDP, they send activations, not parameters.
# The cell computes the bytes of the model states of Llama-3-8B (16 for each parameter, as in notebook
# 01), those of a quarter of its layers, and the bytes that one sequence sends between two stages.

# %%
parameters, hidden, sequence = 8.03e9, 4096, 8192
print(f"16 bytes for each parameter: {16 * parameters / 1e9:.0f} GB on one GPU")
print(f"the same on each of 4 stages: {16 * parameters / 4 / 1e9:.0f} GB")
print(f"b·s·h of one sequence, in 16 bits: {2 * sequence * hidden / 1e6:.0f} MB")

# %% [markdown]
# A rank keeps its own layers and sends one tensor of b·s·h. In 1F1B two neighbours send to each other at
# the same time: one an output, the other a gradient. Below, both call `dist.send` first and
# `dist.recv` afterwards. What will happen?

# %%
def exchange():
    tensor = torch.ones(1_000_000)
    other = 1 - dist.get_rank()
    dist.send(tensor, other)  # returns when the other rank has received
    dist.recv(tensor, other)


lab.diagnose(exchange, ranks=2, device="cpu")

# %% [markdown]
# Both ranks wait in `send`, so neither reaches its `recv`: a deadlock. With NCCL the same
# happens, on the GPU's stream instead of in Python.

# %% [markdown]
# So a pipeline's sends must not block. NCCL also ignores tags: the k-th receive between two ranks gets
# the k-th send. The lab's links therefore use `dist.isend`, and keep each sent tensor until it has
# arrived. Outputs and gradients have separate process groups. A rank waits only when it receives. In a
# legal schedule the waits form no cycle, so there is no deadlock.

# %% [markdown]
# On a rank, an action is an `Action(kind, micro_batch, stage)`. You write what it does.
# `links` has three methods:
#
# | call | what it does |
# |:--|:--|
# | `links.receive(action)` | F: the output of the stage before. B: the gradient of this stage's output. None if there is none |
# | `links.send(action, tensor)` | F: to the next stage. B: to the stage before. An error if there is no such stage |
# | `links.is_last(action)` | whether the stage is the last, which computes the loss. The first is 0 |

# %% [markdown]
# A stage is a module. The cell prints the second of two stages of a small Llama: it has no embedding, but
# the last norm and the head. It takes hidden states and returns logits. `layers` has the number of
# layers of each stage; stages count from 0. (`F` makes a forward action here, so do not import torch's
# functional as `F`.)

# %%
lab.show_stage(layers=[1, 2], number=1)

# %% [markdown]
# The loss is a mean over tokens. But micro-batches can have different numbers of targets, because
# targets of -100 are ignored. Guess: one micro-batch has 10 targets and a mean loss of 4, another one
# has 90 and a mean loss of 2. What is the mean over all targets?

# %%
# A guess, for exercise 7.18
### BEGIN SOLUTION
my_guess = 2.2
### END SOLUTION
labs.guess("7.18", "mean loss of 10 targets at 4 and 90 at 2", my_guess)

# %%
(10 * 4 + 90 * 2) / (10 + 90)

# %% [markdown]
# The mean of the two means would be 3. So each micro-batch must return the *sum* of its losses,
# divided by the number of targets of all micro-batches.

# %% [markdown]
# ### Exercise 7.18 · Executing a schedule
#
# *Difficulty 4 of 5 · 30 minutes · target: 5 steps equal one process on 2, 3 and 4 ranks; each message
# b·s·h numbers*
#
# `stages[number]` are this rank's stages. `micro_batches[i]` has `"input_ids"` and `"targets"`, already
# shifted. `nn.functional.cross_entropy` ignores targets of -100; flatten logits to two dimensions,
# targets to one. `run_forward` returns the stage's input and output: on the last stage the sum of the
# losses, divided by `n_targets`, the number in all micro-batches.

# %%
# Exercise 7.18: receive, compute, send
def run_forward(action, stages, batch, n_targets, links):
    ### BEGIN SOLUTION
    received = links.receive(action)
    given = batch["input_ids"] if received is None else received.requires_grad_()
    output = stages[action.stage](given)
    if links.is_last(action):
        logits, wanted = output.flatten(0, 1), batch["targets"].flatten()
        return given, nn.functional.cross_entropy(logits, wanted, reduction="sum") / n_targets
    links.send(action, output)
    return given, output
    ### END SOLUTION

# %% [markdown]
# Now the complete list of a rank. `kept` holds what each forward returned. When a backward has used it,
# it must be freed. Gradients of parameters accumulate in `.grad`. Return the sum of the losses
# as a number; on ranks without the last stage it is 0.

# %%
# Exercise 7.18: all actions of a rank, in order
def run_actions(actions, stages, micro_batches, links):
    kept, loss = {}, 0.0
    n_targets = sum((batch["targets"] != -100).sum().item() for batch in micro_batches)
    for action in actions:
        key, batch = (action.stage, action.micro_batch), micro_batches[action.micro_batch]
        ### BEGIN SOLUTION
        if action.kind == "F":
            kept[key] = run_forward(action, stages, batch, n_targets, links)
            loss += kept[key][1].item() if links.is_last(action) else 0.0
        else:
            given, output = kept.pop(key)
            output.backward(links.receive(action))
            if action.stage > 0:
                links.send(action, given.grad)
        ### END SOLUTION
    return loss

# %%
lab.check_run_actions(run_actions)

# %% [markdown]
# <details><summary>Hint</summary>
#
# A received tensor has no autograd history, because the rest of the graph is on another rank. But
# the gradient of the stage's input is needed. So the received tensor must require gradients
# *before* the stage computes with it. The first stage receives nothing: its input is tokens.
#
# Backward: take what the forward kept out of the dictionary. Receive the gradient of the output (on the
# last stage there is none: backward starts from the loss). Run backward from the output with it. Send
# the gradient of the input, unless the stage is the first.
#
# </details>

# %%
lab.show_training(run_actions, one_f_one_b, ranks=4, micro_batches=6)

# %% [markdown]
# No rank has the complete model, and the losses equal those of one process. A rank in the middle sends two messages for each micro-batch, an output and a gradient. The first and
# the last rank send one. The bytes of a message do not depend on the number of layers of a rank.

# %% [markdown]
# ## Simulated and measured timelines
#
# The simulation predicted when each action runs. Is that so on ranks? The next cell runs your 1F1B on
# four ranks and measures every F and B. It then simulates the schedule with the measured times, and draws
# both. On a CPU each action sleeps until it has lasted 60 ms (an unsplit backward 120), because two cores
# cannot compute for four ranks at once.

# %% [markdown]
# On a busy machine some actions last longer, in both timelines. Then both bubbles are larger. If the
# cell says that a step was unusual, run it again.

# %%
lab.show_measured(one_f_one_b, ranks=4, micro_batches=6)

# %% [markdown]
# **Notice:** both timelines have nearly the same bubble; rank 0 has four micro-batches in flight, the last rank
# one.
#
# The shortest of three measured steps is drawn. Its bubble is larger than the formula's, because
# messages take time and actions do not all last equally long. Bytes are measured, too: what autograd
# saves in a forward is freed by the backward. The last rank's micro-batch is larger, because it
# includes logits and loss.

# %%
lab.show_measured(zb_h1, ranks=4, micro_batches=6)

# %% [markdown]
# W fills a part of 1F1B's idle time. By the formulas the step takes 21 slots instead of 27, so 22 % less;
# a busy machine loses a part of the gain. B frees almost nothing, because W still needs what the forward
# saved. So activations are in flight until W, and each rank has as many micro-batches in flight as the
# first rank has in 1F1B.

# %% [markdown]
# ## Load balance of stages
#
# All ranks wait for the slowest stage. An embedding is a look-up, which costs almost nothing. The head
# multiplies with the whole vocabulary. The cell computes the costs of the parts of Llama-3-8B in layers,
# from the parameters that multiply each token. It then measures forward and backward of a small
# Llama with the same proportions. (The embedding's backward writes a gradient for the whole
# vocabulary.)

# %%
width, kv_width, ffn_width, words = 4096, 1024, 14336, 128256
layer_cost = 2 * width * width + 2 * width * kv_width + 3 * width * ffn_width
costs = [0, *[1] * 32, width * words / layer_cost]  # embedding, layers, head
print(f"the head costs as much as {costs[-1]:.2f} layers")
lab.show_part_seconds()

# %% [markdown]
# Llama-3-8B has an embedding, 32 layers and a head: 34 parts. With 8 stages of 4 or 5 parts each, in
# order, the last stage gets three layers and the head. Guess: how much does the slowest stage of the
# best split cost, in layers?

# %%
# A guess, for exercise 7.19
### BEGIN SOLUTION
my_guess = 5
### END SOLUTION
labs.guess("7.19", "layers that the slowest of 8 stages costs", my_guess)

# %% [markdown]
# ### Exercise 7.19 · Balanced stages
#
# *Difficulty 3 of 5 · 20 minutes · target: the slowest stage is the fastest possible, in 300 cases*
#
# `costs` are those of consecutive parts: embedding, layers, head. Return the number of parts of each
# rank, in order, at least one each. The cost of the slowest stage must be the minimum.

# %%
# Exercise 7.19: contiguous stages, the slowest as fast as can be
def split_layers(costs, ranks):
    ### BEGIN SOLUTION
    @functools.cache
    def best(start, ranks):  # of the parts from start on: (slowest stage, parts of each)
        if ranks == 1:
            return sum(costs[start:]), [len(costs) - start]
        tries = []
        for count in range(1, len(costs) - start - ranks + 2):
            rest, counts = best(start + count, ranks - 1)
            tries.append((max(sum(costs[start:start + count]), rest), [count, *counts]))
        return min(tries)

    return best(0, ranks)[1]
    ### END SOLUTION

# %%
lab.check_split_layers(split_layers)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Filling each stage up to the mean fails at the end: the remaining parts may be too much for the last
# rank. Instead, try every size of the first stage, and split the rest optimally over one rank
# less. The slowest stage is the larger of the two.
#
# The same rest occurs many times, so cache its answer (`functools.cache`).
#
# </details>

# %%
lab.show_split(split_layers, costs, ranks=8)

# %% [markdown]
# **Notice:** with equally many parts on each rank, the last stage is the slowest, because the head costs
# as much as 2.4 layers.
#
# Layers are not split, so 5 is the optimum; the lighter stages wait. Several splits reach it. Ours
# gives rank 0 the embedding alone, which computes almost nothing; 4, 5, 5, 5, 4, 4, 4, 3 is as fast.

# %% [markdown]
# *[Llama 3](https://arxiv.org/abs/2407.21783)* had one layer fewer on the first and on the last stage
# (section 3.3.2). The first stage also has the most micro-batches in flight.

# %% [markdown]
# ## The same in torch: torch.distributed.pipelining
#
# torch has this runner. A `PipelineStage` wraps the module of a rank. A schedule such as `Schedule1F1B`
# executes it: `step` splits the batch into micro-batches, sends, receives and runs backward. The first
# stage gets the batch, the last stage the targets and a list for the losses. You call the optimizer.

# %%
def make_half():
    """This rank's half of a model of four layers."""
    torch.manual_seed(0)  # each rank makes the same model, and keeps two layers of it
    model = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 256))
    return model[2 * dist.get_rank():][:2].to(labs.device())

# %%
def pipelined(steps):
    half, batch, means = make_half(), torch.arange(256, device=labs.device()), []
    stage = PipelineStage(half, dist.get_rank(), num_stages=2, device=labs.device())
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.cross_entropy)
    sgd = torch.optim.SGD(half.parameters(), lr=1.0)
    for _ in range(steps):
        losses = []
        if stage.is_first:
            schedule.step(batch)
        else:
            schedule.step(target=batch, losses=losses)
        sgd.step()
        sgd.zero_grad()
        means.append(sum(loss.item() for loss in losses) / 4)
    return means  # zeros on the first stage

# %%
labs.launch(pipelined, 3, ranks=2)

# %% [markdown]
# torch's runtime also reads a schedule like yours, as text with cells such as `0F0,1I2,1W2`: the stage,
# the action, the micro-batch. `I` computes the gradient of the input, like B of a split backward. The
# runtime inserts sends and receives itself. It is private (`_load_csv`), so if a version of torch lacks
# it, the lab's own runner executes your list. The table compares the runs of a small Llama.

# %%
lab.show_runtimes(one_f_one_b, zb_h1)

# %% [markdown]
# All losses are equal. A schedule changes when a gradient is computed, not its value. torch's classes
# divide gradients by m, for a loss that is a mean; this loss is scaled already, so the lab sets
# `scale_grads=False`. With fewer micro-batches than ranks, torch's classes raise an error or hang; your
# runner works.

# %% [markdown]
# ## Optional: gradient clipping and tied embeddings across stages
#
# Clipping needs the global norm of the gradient, but each rank has only the gradients of its stages. And
# if embedding and head are **tied**, one parameter has two copies, on the first and on the last rank.
# Each copy gets only the gradient of its own use, so without a sum the copies differ after the first
# step. How large is that parameter in a small model with Llama-3's vocabulary?

# %%
print(f"Llama-3.2-1B, tied: {128_256 * 2048 / 1e6:.0f} of 1,236 million parameters")

# %% [markdown]
# ### Exercise 7.20 · Clipping across stages
#
# *Difficulty 3 of 5 · 20 minutes · target: 5 steps of a tied Llama equal one process; communicated:
# one number and, on two ranks, the tied gradient*
#
# `parameters` are this rank's, `group` the pipeline's ranks. `tied` is the copy of the tied parameter,
# or None; `tied_group` has the two ranks with a copy. Sum the tied gradients, scale all gradients to
# at most `max_norm` in place; return the norm before that. Some parameters have no gradient.

# %%
# Exercise 7.20: one norm over all stages
def clip_across_stages(parameters, tied, max_norm, group, tied_group):
    ### BEGIN SOLUTION
    if tied is not None:
        dist.all_reduce(tied.grad, group=tied_group)
    gradients = [p.grad for p in parameters if p.grad is not None]
    squares = sum(gradient.square().sum() for gradient in gradients)
    if tied is not None and dist.get_rank(tied_group) > 0:
        squares = squares - tied.grad.square().sum()
    dist.all_reduce(squares, group=group)
    norm = squares.sqrt()
    for gradient in gradients:
        gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1))
    return norm
    ### END SOLUTION

# %%
lab.check_clip_across_stages(clip_across_stages)

# %% [markdown]
# <details><summary>Hint</summary>
#
# The order matters: sum the tied gradient before you square it.
#
# All-reduce it over its two ranks. Sum the squares of all gradients of this rank, but on one of the two
# ranks leave the tied gradient out, because it would count twice. All-reduce the sum of squares and take
# the root. Scale every gradient by max_norm / norm, or by 1 if that is larger than 1.
#
# </details>

# %% [markdown]
# ## Third sitting · 100 minutes
#
# | In short | This sitting |
# |:--|:--|
# | **Core** | 7.21, 7.23, 7.24, 7.25, 7.27 |
# | **Optional** | none |
# | **In a new kernel** | run the cell of the imports |
#
# You will be able to:
#
# - compute a rank's coordinates and groups in a device mesh;
# - apply FSDP and tensor parallelism to the stages of a pipeline;
# - choose a plan for a model, a cluster and a batch by models of memory and time;
# - write a pipeline in plain PyTorch.

# %% [markdown]
# ## 3D parallelism
#
# A model of 175 billion parameters needs more than 3 TB of states. Tensor parallelism divides them by 8, the
# number of GPUs in a node. A pipeline of 12 stages divides them by 12 more. That is a *replica* of 96
# GPUs. With 3,072 GPUs there are 32 replicas, which train as in notebooks 02 to 04:
#
# data 32 × pipeline 12 × tensor 8 = 3,072.

# %%
job = lab.JOBS["GPT-175B"]
# 18 bytes for each parameter: see "Memory of one rank".
states = 18 * (96 * job.layer_parameters + job.embedding_parameters)
print(f"{job}: {states / 1e12:.2f} TB of states, {states / 96 / 1e9:.1f} GB on each of 96 GPUs")

# %% [markdown]
# ## Device mesh and process groups
#
# `init_device_mesh("cuda", (32, 12, 8))` numbers the ranks so that the *last* dimension varies
# fastest: ranks 0 to 7 differ in the tensor dimension only. So they are on one node.
# Each layer all-reduces four times among them; a stage of the pipeline sends one tensor.
#
# Guess: rank 0 is in a tensor, a pipeline and a data group. On how many nodes of 8 GPUs are the 12
# ranks of its pipeline group?

# %%
# A guess, for exercise 7.21
### BEGIN SOLUTION
my_guess = 12
### END SOLUTION
labs.guess("7.21", "nodes of the pipeline group of rank 0", my_guess)

# %% [markdown]
# ### Exercise 7.21 · Coordinates and groups of a rank
#
# *Difficulty 2 of 5 · 12 minutes · target: right for meshes of one to four dimensions, of any sizes*
#
# `coordinates(rank, sizes)` returns the rank's coordinate in each dimension, the slowest dimension first.
# `group(rank, dimension, sizes)` returns the ranks that differ from it in that dimension alone, ordered
# by their coordinate. Dimensions count from 0.

# %%
# Exercise 7.21: coordinates and groups
def coordinates(rank, sizes):
    ### BEGIN SOLUTION
    places = []
    for size in reversed(sizes):
        rank, place = divmod(rank, size)
        places.insert(0, place)
    return tuple(places)
    ### END SOLUTION


def group(rank, dimension, sizes):
    ### BEGIN SOLUTION
    apart = math.prod(sizes[dimension + 1:])
    first = rank - coordinates(rank, sizes)[dimension] * apart
    return [first + place * apart for place in range(sizes[dimension])]
    ### END SOLUTION

# %%
lab.check_mesh(coordinates, group)

# %%
lab.show_mesh(group)

# %% [markdown]
# **Notice:** on the left, each tensor-parallel group is inside one node; on the right, with the dimensions
# in the other order, it spans 8 nodes.
#
# There the four all-reduces of every layer cross a link with about a tenth of the bytes per second.

# %% [markdown]
# ## 3D parallelism on eight ranks
#
# Two replicas, each of two stages, each of two tensor-parallel ranks: 2 × 2 × 2. You know the parts:
# `parallelize_module` shards a layer's matrices over the tensor ranks (07a), `fully_shard` shards the
# results over the data ranks (04), and a runner like yours of 7.18 connects the stages.
#
# `stage.body.layers` are the layers of a stage of a small Llama. `mesh["tensor"]` and `mesh["data"]` are
# one-dimensional meshes, which both functions take.

# %% [markdown]
# Guess before you run: the layers' matrices are sharded over 2 tensor and 2 data ranks, in 2 stages. Norms,
# embedding and head are sharded over data ranks only. What percentage of all parameters does a rank have?

# %%
# A guess, for exercise 7.23
### BEGIN SOLUTION
my_guess = 14
### END SOLUTION
labs.guess("7.23", "percent of the parameters on a rank", my_guess)

# %% [markdown]
# ### Exercise 7.23 · FSDP, pipeline and tensor parallelism
#
# *Difficulty 3 of 5 · 15 minutes · target: five steps on 8 ranks equal to one process; a rank keeps at
# most 1/4 of its stage's matrices*
#
# Make a plan, a dictionary: it maps the name of each matrix of a layer, such as "self_attn.q_proj" or
# "mlp.down_proj" (exercise 7.18 printed all seven), to `ColwiseParallel()` or `RowwiseParallel()`.
# Then apply both functions in the right order, and return the stage.

# %%
# Exercise 7.23: a stage, sharded in two more dimensions
def parallelize(stage, mesh):
    ### BEGIN SOLUTION
    into = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
            "mlp.gate_proj", "mlp.up_proj")
    plan = {name: ColwiseParallel() for name in into}
    plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    for layer in stage.body.layers:
        parallelize_module(layer, mesh["tensor"], plan)
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(stage, mesh=mesh["data"])
    return stage
    ### END SOLUTION

# %%
lab.check_three_dimensions(parallelize)

# %% [markdown]
# <details><summary>Hint</summary>
#
# A column-parallel layer gives each rank its own shard of the output. A row-parallel layer takes such
# a shard as its input. Which of a layer's seven matrices come first? Which is the last of attention,
# and which of the MLP?
#
# `fully_shard` gathers a unit just before it computes. So each layer is a unit of its own, and the rest
# of the stage is one more. It shards the parameters that it finds, so tensor parallelism comes first.
#
# </details>

# %%
lab.show_three_dimensions(parallelize)

# %% [markdown]
# **Notice:** the pipeline sends the fewest bytes, FSDP the most.
#
# The pipeline sends a hidden state and its gradient for each micro-batch. FSDP gathers every layer
# in each forward and each backward of the 4 micro-batches. Tensor parallelism has 7 all-reduces for
# each layer and micro-batch, not 4: the gradients of the inputs of q, k, v, gate and up are reduced
# one by one.

# %% [markdown]
# A pipeline can gather once a step. With `fully_shard(..., reshard_after_forward=False)` and
# `set_reshard_after_backward(False)` the parameters stay gathered. But `optimizer.step()` updates only
# the shards, so the gathered copies are then *stale*: the training loop must call `reshard()` on each
# unit after the last backward. With torch's `PipelineStage`, only `reshard_after_forward=False` is
# needed: the rest it does itself. Or use ZeRO-1: its ranks have all parameters of their stage.

# %% [markdown]
# ## Memory of one rank
#
# The 18 bytes of states per parameter are 2 for the parameter, 4 for its gradient and 12 for the optimizer
# state. ZeRO-1 divides the optimizer state by the number of data-parallel ranks. A
# rank also needs memory for activations. Stage 0 has p micro-batches in flight, and the embedding. The
# last stage has one in flight, and the head.

# %% [markdown]
# A plan's `recompute` says what backward computes again: "selective" is attention alone (notebook 06).

# %% [markdown]
# | name | is |
# |:--|:--|
# | `job.layer_parameters` | the parameters of one layer |
# | `job.embedding_parameters` | those of the embedding; the head has as many |
# | `plan.data`, `plan.tensor`, `plan.pipeline` | the sizes of the dimensions |
# | `plan.layers(job, stage)` | the layers of a stage |
# | `plan.micro_batches(job)` | the micro-batches of a step, on each replica |
# | `lab.layer_activations(job, plan)` | the bytes that one layer saves on one rank for one micro-batch (notebook 01) |

# %%
plan = lab.Plan(data=32, tensor=8, pipeline=12, sharding="ZeRO-1", micro_batch=1)
print(plan, "|", plan.layers(job, stage=0), "layers,", plan.micro_batches(job), "micro-batches")
print(f"{lab.layer_activations(job, plan) / 1e6:.0f} MB of a layer's activations")

# %%
# A guess, for exercise 7.24
### BEGIN SOLUTION
my_guess = 22
### END SOLUTION
labs.guess("7.24", "GB on a rank of stage 0", my_guess)

# %% [markdown]
# ### Exercise 7.24 · The memory of one rank
#
# *Difficulty 3 of 5 · 15 minutes · target: four parts, right to 0.2 % for 23 ranks of 9 plans*
#
# Return a dictionary with "parameters", "gradients", "optimizer state" and "activations", in bytes,
# for 1F1B and ZeRO-1. Tensor parallelism shards all matrices; the norms, which it does not shard, are too
# small to matter. The embedding and the head are two matrices.

# %%
# Exercise 7.24: bytes of one rank of a stage
def rank_memory(job, plan, stage):
    ### BEGIN SOLUTION
    matrices = (stage == 0) + (stage == plan.pipeline - 1)
    own = plan.layers(job, stage) * job.layer_parameters + matrices * job.embedding_parameters
    own /= plan.tensor
    in_flight = min(plan.pipeline - stage, plan.micro_batches(job))
    return {"parameters": 2 * own, "gradients": 4 * own, "optimizer state": 12 * own / plan.data,
            "activations": plan.layers(job, stage) * lab.layer_activations(job, plan) * in_flight}
    ### END SOLUTION

# %%
lab.check_rank_memory(rank_memory)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Begin with the parameters of the rank: which layers, which of the two large matrices, divided by what?
# Three parts follow from that number. Which of them does ZeRO-1 divide, and by how many ranks?
#
# For activations, look at the timeline of 1F1B: when the first backward of a stage begins, how many
# forwards has the stage run? Can there be more than the step has micro-batches?
#
# </details>

# %%
lab.show_stages(rank_memory, job, plan)

# %% [markdown]
# **Notice:** the bars become lower from left to right, because each stage has one micro-batch fewer in
# flight than the stage before it. (The lab adds the logits of the last stage.)
#
# The optimizer state, two thirds of all states in notebook 03, is less than 1 GB, because ZeRO-1
# divides it by 32. Three quarters of the GPU stay empty.

# %% [markdown]
# So how many stages does this job need? The table uses the same memory model, and notebook 06's model of
# a step's seconds.

# %%
lab.show_plan_costs(job, [lab.Plan(data=384 // stages, pipeline=stages, tensor=8)
                          for stages in (1, 2, 4, 6, 12, 24)])

# %% [markdown]
# The third column is the time of data-parallel communication that computation does not hide. Two
# stages would be enough for memory. More stages make the step shorter, because a rank all-reduces
# only the gradients of its own stage. Beyond 12 stages the gain is small, and the bubble grows.

# %% [markdown]
# How accurate is the model? Below are five published steps of 175 billion parameters. Two are of
# *[Korthikanti et al.](https://arxiv.org/abs/2205.05198)* (table 5); the model was fitted to them, among
# others. Three are of Megatron-LM, measured in *[MegaScale](https://arxiv.org/abs/2402.15627)* (table 2);
# the model was not fitted to these. The runs have 3 and 6 chunks on a pipeline rank (`chunks` of a plan), as
# in exercise 7.16. MegaScale prints neither micro-batch nor recomputation: 1 and selective are assumed.

# %%
lab.show_published_steps()

# %% [markdown]
# With the chunks of these runs all five errors are below 8 %, and all predictions are too
# fast. With one chunk MegaScale's three errors would be smaller, but only because a bubble 6 times
# too long hides what the model leaves out. Compare a model with a run only if both use the same
# schedule.

# %% [markdown]
# The last two rows have the same batch: four times the GPUs are less than four times as fast. The batch size is fixed, so each
# rank computes a quarter, but it all-reduces as many gradients as before. The bubble does not shrink
# either, but with 6 chunks it is a small part of the step.

# %% [markdown]
# ## Choosing a parallelism plan
#
# DDP, ZeRO, FSDP, HSDP, tensor, pipeline, context parallelism: which of them fits a given model, cluster
# and batch? One job has thousands of plans, and a bad plan is many times slower than the best. Models of
# memory and time decide.
#
# | Call | returns |
# |:--|:--|
# | `lab.plans(job)` | all plans that the sizes allow |
# | `lab.fits(job, plan)` | whether the largest rank fits on its GPU |
# | `lab.step_seconds(job, plan)` | seconds of a step |

# %% [markdown]
# A context-parallel rank has at least 1,024 tokens of a sequence, and gathers keys and values, as in
# Llama 3. `schedule` is "1F1B" or "ZB-H1". Under 1F1B a pipeline rank can have several stages, as in 7.16:
# their number is `chunks`. It must divide the rank's layers, and `pipeline`, the number of pipeline ranks,
# must divide the micro-batches.

# %% [markdown]
# With FSDP a pipeline rank gathers its parameters once a step, and reduces a stage's gradients when its
# micro-batches are done. Each GPU has its own network card, except in the job "one card".

# %%
for name in lab.JOBS:
    each = lab.JOBS[name]
    print(f"{sum(1 for _ in lab.plans(each)):6,} plans  {each}")

# %% [markdown]
# Guess before you search: 405 billion parameters, sequences of 8,192 tokens, 16,384 GPUs. How many
# GPUs does one replica of the fastest plan have?

# %%
# A guess, for exercise 7.25
### BEGIN SOLUTION
my_guess = 128
### END SOLUTION
labs.guess("7.25", "GPUs of a replica of 405B parameters", my_guess)

# %% [markdown]
# ### Exercise 7.25 · The fastest plan that fits
#
# *Difficulty 2 of 5 · 12 minutes · target: plans that fit for ten jobs, none more than 5 % slower than the fastest*
#
# `choose_plan(job)` returns the plan with the shortest step among those that fit, or None if none fits. What
# is each dimension worth? With settings, as in `choose_plan(job, tensor=1, sharding="FSDP")`, only plans
# with these attribute values are considered. `help(lab.Plan)` lists the attributes.

# %%
# Exercise 7.25: the final rule
def choose_plan(job, **settings):
    ### BEGIN SOLUTION
    fitting = []
    for plan in lab.plans(job):
        asked_for = all(getattr(plan, name) == value for name, value in settings.items())
        if asked_for and lab.fits(job, plan):
            fitting.append(plan)
    return min(fitting, key=lambda plan: lab.step_seconds(job, plan), default=None)
    ### END SOLUTION

# %%
lab.check_choose_plan(choose_plan)

# %%
lab.show_plans(choose_plan)

# %% [markdown]
# **Notice:** each number is the result of a call of your function, with other settings. In each row, a
# dimension is worth having where it makes the number smaller.
#
# A small model on one node needs DDP only. No GPU has the memory for 70B, so plain DDP has no number.
# 175B on 3,072 GPUs cannot be data parallel only, because its batch has 1,536 sequences. The last column
# matters if a replica has few micro-batches for its stages.

# %% [markdown]
# One of these jobs was run: *[Llama 3](https://arxiv.org/abs/2407.21783)*, TP 8 × PP 16 × DP 128, at 400
# TFLOP/s per GPU (table 4). How many seconds per step is that? It depends on the FLOPs that are counted:
# 6N per token, or also the 12·L·h·s of attention. The report does not print its formula. For its MFU it
# cites *[PaLM](https://arxiv.org/abs/2204.02311)*, whose formula counts all of attention. The run with
# 131,072 tokens is a test, because there attention is the larger part.

# %%
lab.show_llama_3_seconds()

# %% [markdown]
# At 131,072 tokens, 6N alone would leave less time than matrix products and attention need without any
# communication. So the TFLOP/s count attention. PaLM's formula counts all of it; then the published
# step of 8,192 tokens takes 6.74 s. A causal kernel computes half of it; then the step takes 6.48 s.
# This test excludes neither, so the next table has both.

# %%
lab.show_published_plans(choose_plan)

# %% [markdown]
# **Notice:** for 16,384 GPUs and 8,192 tokens your search finds the plan that Meta ran, and its step
# is predicted within 5 % under both assumptions.

# %% [markdown]
# At 131,072 tokens the prediction is 16 % too fast if all of attention is counted, and 18 % too slow
# if half of it is. So not even the sign of the error is known. Document masks act in both directions:
# they cause load imbalance, and they save work. The model knows neither.

# %% [markdown]
# For 8,192 GPUs the published plan is 1.5 GB too large for our model; Meta freed tensors early. What
# makes the plan fast? The cell changes one setting at a time.

# %%
published = lab.Plan(data=128, tensor=8, pipeline=16, sharding="FSDP", recompute="none", chunks=8)
changes = ({}, {"chunks": 1}, {"chunks": 1, "schedule": "ZB-H1"}, {"sharding": "ZeRO-1"},
           {"recompute": "full"})
lab.show_plan_costs(lab.JOBS["Llama-3-405B"],
                    [replace(published, **change) for change in changes])

# %% [markdown]
# With one chunk on each rank the step takes more than 1.5 times as long, because there are only 16
# micro-batches for 16 pipeline ranks. And the unsharded gradients of all layers of a rank do not fit.
# ZB-H1 is faster, but has p micro-batches in flight on every stage. ZeRO-1 does not shard the gradients.
# Full recomputation fits easily, but computes a third more. Eight chunks solve both problems.

# %% [markdown]
# `labs.plan` draws any plan of this job beside the published one. Move `chunks` to 4, 2 and 1. Which part
# of the memory grows, and which part of the seconds? Then find another plan that fits and is not much slower.

# %%
labs.plan(job=lab.JOBS["Llama-3-405B"], plan=published)

# %% [markdown]
# ## A script of your own
#
# `pipeline.py` trains a transformer on 2 ranks or more, up to the number of micro-batches. It uses
# what "The same in torch" shows: `PipelineStage(module, stage_index, num_stages, device)`,
# `Schedule1F1B(stage, n_microbatches, loss_fn=...)` and `schedule.step`. A stage in the middle calls
# `step()` without arguments. Each module takes what the stage before it returns.

# %% [markdown]
# ### Exercise 7.27 · `pipeline.py`
#
# *Difficulty 3 of 5 · 25 minutes · target: losses and parameters equal one process, on 2 ranks and on
# 4; no more micro-batches in flight than 1F1B*
#
# The next cell writes the file. Fill in its two gaps: the layers of a rank, and the training loop. `train`
# returns a list: the mean loss of each step on the last rank, nothing on the others.

# %%
lab.write_script("pipeline.py")

# %%
lab.check_pipeline("pipeline.py")

# %% [markdown]
# <details><summary>Hint</summary>
#
# First gap: the layers are in the order in which they run. Rank r of n begins at layer r · L // n. An
# `nn.Sequential` of an `OrderedDict` keeps names, which the saved file needs.
#
# Second gap: stage, schedule, optimizer, then one loop. Three kinds of ranks call `step` differently.
# The schedule divides gradients by the number of micro-batches, so a mean loss stays a mean.
#
# </details>

# %%
lab.torchrun("pipeline.py", "--epochs", 4, ranks=2)

# %% [markdown]
# No rank has trained a layer of another rank, and no gradient was reduced. Data parallelism would be a
# second dimension of the mesh, as in 7.23. The saved files together are the complete model.

# %% [markdown]
# ## How it usually goes wrong
#
# | Symptom | Cause |
# |:--|:--|
# | the first step hangs | two neighbours wait in `send`: use `isend` |
# | gradients m times too large | means of micro-batches were summed |
# | embedding and head diverge | two copies of a tied parameter, gradients not summed |
# | the last stage runs out of memory | the head was not counted as a layer |
# | bubble above the formula | unbalanced stages; with ZB-H1, m < p |
# | tensor parallelism is slow | its group spans nodes: wrong order of the mesh's dimensions |

# %% [markdown]
# ## I can …
#
# - write a schedule as data, and compute its bubble and its peak before I run it
# - say why zero bubble needs a split backward
# - execute a schedule on ranks without a deadlock
# - compute a rank's groups from its number
# - name the parts of a rank's memory in a job of 3,072 GPUs
# - say which dimension a job needs next, and why
# - compare a planner with a published run, with the schedule of that run

# %% [markdown]
# ## What to read
#
# - Huang et al., *GPipe*, 2019, section 2.3: why does recomputation matter more here than elsewhere?
# - Narayanan et al., *[Efficient Large-Scale Language Model Training on GPU
#   Clusters](https://arxiv.org/abs/2104.04473)*, 2021, section 3: which two dimensions does takeaway 1
#   separate?
# - Qi et al., *[Zero Bubble Pipeline Parallelism](https://arxiv.org/abs/2401.10241)*, 2024, section 2:
#   which assumption makes H1's memory that of 1F1B?
# - Grattafiori et al., *[The Llama 3 Herd of Models](https://arxiv.org/abs/2407.21783)*, 2024, section
#   3.3.2: why is the order of its dimensions TP, CP, PP, DP?

# %% [markdown]
# ## What comes next
#
# With thousands of GPUs a failure occurs every few hours. **08** kills ranks, and training continues.
#
# Sharding in JAX (exercise 7.26) has a notebook of its own, which is optional:
# [07c](07c_sharding_in_jax.ipynb).
