# %% [markdown]
# # 07b · Pipeline parallel, three dimensions
#
# | | |
# |:--|:--|
# | **Time** | 270 minutes in two sittings, the second from "Three dimensions"; 10 for the optional exercise |
# | **Needs** | any machine with 2 cores; no GPU; JAX for the last section only |
#
# Tensor parallelism ends at the last GPU that NVLink reaches. Beyond it, ranks get whole layers: a
# pipeline. Here you write its schedules, run them on ranks, and put all dimensions together.

# %% [markdown]
# *On a CPU* the order of the actions, the messages and the memory of each rank are those of a GPU node.
# Two cores cannot run four ranks at once, so a measured timeline gives each action a length that it
# cannot fall below: its order and its idle times are real, its milliseconds are not a GPU's.

# %% [markdown]
# ## You will be able to
#
# - write GPipe, 1F1B, interleaved 1F1B and a zero-bubble schedule, and prove what each costs;
# - run a schedule on real ranks, equal to one process, with micro-batches of unequal size;
# - say which rank is where in a mesh of three dimensions, and what it holds;
# - choose dimensions for a model, a cluster and a batch by models of memory and time;
# - read the same layouts in JAX.

# %%
import functools
import math
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import labs
import labs.pipeline_parallel as lab
from labs.pipeline_parallel import B, F, W

labs.warm_up()

# %% [markdown]
# ## A pipeline of stages
#
# Tensor parallelism all-reduces four times in every layer, so it stays inside a node. With **pipeline
# parallelism** each rank has a **stage**, some consecutive layers, and only the residual stream
# crosses to the next stage: its values in forward, their gradients in backward. How much less is
# that? The cell takes GPT-3 with 8 stages, one sequence, 16 bits.

# %%
layers, s, h = 96, 2048, 12_288
stream = 2 * s * h  # bytes of the residual stream
print(f"between two stages, forward and backward: {2 * stream / 1e6:,.0f} MB")
print(f"all-reduced by tensor parallelism in a stage: {layers // 8 * 4 * stream / 1e6:,.0f} MB")

# %% [markdown]
# But a stage waits for the stage before it. With one batch, one rank works while all others wait. So
# the batch is cut into m micro-batches, and a **schedule** says in which order each rank works:
# `F(i)` is the forward of micro-batch i, `B(i)` its backward. Sending and receiving are not listed: a
# rank waits until what it needs is there.
#
# Here two ranks train on two micro-batches. The first list is rank 0's.

# %%
lab.draw_schedule([[F(0), F(1), B(0), B(1)], [F(0), B(0), F(1), B(1)]], micro_batches=2)

# %% [markdown]
# A forward takes one *slot*, a backward two, because it has two matrix products for each one of the
# forward. What is grey is the **bubble**: time in which a rank computes nothing.
#
# Not every order can run. The next cell exchanges the two lists and asks the lab what is wrong.

# %%
print(lab.why_illegal([[F(0), B(0), F(1), B(1)], [F(0), F(1), B(0), B(1)]], micro_batches=2))

# %% [markdown]
# ## GPipe: all ranks at work
#
# p ranks train on m micro-batches. The simplest schedule that keeps them at work is **GPipe**'s: first
# all forwards, then all backwards. It still has a bubble, while the first micro-batch is on its way
# to the last rank, and while the last gradient is on its way back.
#
# Guess: with 4 ranks and 8 micro-batches, what percentage of the step is a rank idle?

# %%
# A guess, for exercise 7.14
### BEGIN SOLUTION
my_guess = 27
### END SOLUTION
labs.guess("7.14", "% of the step that a rank is idle, GPipe, p = 4, m = 8", my_guess)

# %% [markdown]
# ### Exercise 7.14 · GPipe
#
# *Difficulty 1 of 5 · 8 minutes · target: 3(m + p − 1) slots*
#
# `gpipe(ranks, micro_batches)` returns the schedule: a list with a list of actions for each rank. It
# must work for any numbers, also for fewer micro-batches than ranks. Micro-batches count from 0.

# %%
# Exercise 7.14: all forwards, then all backwards
def gpipe(ranks, micro_batches):
    ### BEGIN SOLUTION
    forwards = [F(i) for i in range(micro_batches)]
    backwards = [B(i) for i in range(micro_batches)]
    return [forwards + backwards for _ in range(ranks)]
    ### END SOLUTION

# %%
lab.check_gpipe(gpipe)

# %%
lab.show_schedules(gpipe, ranks=4, micro_batches=8)

# %% [markdown]
# **Notice:** every rank is idle for 3(p − 1) slots, whatever m is. As a share of the whole step this is
# (p − 1)/(m + p − 1); Megatron's paper quotes the same bubble as (p − 1)/m, a share of the step
# without it. More micro-batches make either share smaller.

# %% [markdown]
# ## 1F1B: the same bubble, less memory
#
# What a forward saves stays in memory until its backward: the micro-batch is **in flight**. GPipe
# has all m in flight. The cell computes what that means for a stage of GPT-3 that is cut once more, by
# tensor and sequence parallelism over 8 GPUs of 80 GB.

# %%
activations = layers // 8 * lab.korthikanti(1, s, h, heads=96, tensor_parallel=8,
                                            sequence_parallel=True, recompute="selective")
for m in (8, 64):
    print(f"GPipe, {m:2} micro-batches: {m * activations / 1e9:5.1f} GB of activations on a GPU")

# %% [markdown]
# So a GPU would have no room for the 64 micro-batches that make the bubble small. The last rank could
# run the backward of micro-batch 0 at once. Then the rank before it could, and so on: as soon as its
# first gradient is there, a rank alternates one forward, one backward (**1F1B**).
#
# Guess: how many micro-batches does rank 0 then have in flight at its peak, with 4 ranks and 8
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
# Now the lists of the ranks differ. Each begins with some forwards, the *warm-up*; then F and B
# alternate; what is left at the end are backwards. With fewer micro-batches than ranks some ranks
# never come to alternate.

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

# %% [markdown]
# <details><summary>Hint</summary>
#
# Look at the last rank first: it needs no warm-up, because it makes its first gradient itself. The
# rank before it must send one micro-batch more before a gradient comes back.
#
# For each rank: count its warm-up, but never more than m. Add the warm-up's forwards. For each
# forward that is left, add it and the earliest backward that has not run. Then add the backwards
# that are left.
#
# </details>

# %%
lab.check_one_f_one_b(one_f_one_b)

# %%
lab.show_schedules(gpipe, one_f_one_b, ranks=4, micro_batches=8, activation_gb=activations / 1e9)

# %% [markdown]
# **Notice:** both steps take equally long. Under 1F1B rank r has p − r micro-batches in flight, however
# many there are in all; under GPipe every rank has m. So now m can grow until the bubble is small
# enough.

# %% [markdown]
# ## Interleaved: a smaller bubble, more messages
#
# A larger m means a larger batch, and that has a limit (notebook 06). Another way is to fill the
# pipeline faster: cut the model into v·p stages and give each rank v of them, its **chunks**. Stage s
# is on rank s mod p: a micro-batch goes around v times. `F(i, chunk=1)` is a forward of the
# second chunk, which takes 1/v slot.
#
# Guess the bubble for 2 chunks, 4 ranks, 8 micro-batches.

# %%
# A guess, for exercise 7.16
### BEGIN SOLUTION
my_guess = 16
### END SOLUTION
labs.guess("7.16", "% of the step that a rank is idle, v = 2, p = 4, m = 8", my_guess)

# %% [markdown]
# ### Exercise 7.16 · Interleaved 1F1B
#
# *Difficulty 5 of 5 · 30 minutes · target: 3(m + (p − 1)/v) slots, and at most as much in flight as
# Megatron-LM has, (v − 1)p + 2p − 1 chunks*
#
# m is a multiple of p here. Megatron-LM's order works in groups of p micro-batches: a group goes
# through chunk 0, then through chunk 1, up to the last; then the next group. Backwards are in the
# same groups, but visit the last chunk first.

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

# %% [markdown]
# <details><summary>Hint</summary>
#
# The order of the forwards is the same on every rank, and so is that of the backwards. Only the length
# of the warm-up differs.
#
# Make the list of all forwards (for each group, for each chunk, for each micro-batch of the group) and
# that of all backwards. The last rank's first backward is that of the last chunk: before it, the group
# passes through v − 1 chunks. Each rank before the last one needs one more forward than the next one.
# Megatron-LM takes two more, so that a rank has work while a message travels. Then alternate, as in
# 1F1B.
#
# </details>

# %%
lab.check_interleaved(interleaved)

# %%
lab.show_schedules(one_f_one_b, interleaved, ranks=4, micro_batches=8, chunks=2)

# %% [markdown]
# **Notice:** the idle slots are halved. Two things are paid for that: a micro-batch passes 2p − 1 borders
# between stages in place of p − 1, so that about v times as much is sent; and more is in flight: the
# last rank needs 2.5 micro-batches in place of 1. (The formula's tick is Megatron-LM's peak.)

# %% [markdown]
# ## Zero bubble: a backward has two parts
#
# For a linear layer y = xWᵀ, backward computes the gradient of x and that of W. Each is a matrix
# product as large as the forward's. But only the first one is waited for: by the stage before. The
# second has time until the optimizer's step. The cell runs them one after the other.

# %%
layer, x = nn.Linear(6, 4, bias=False), torch.randn(3, 6, requires_grad=True)
y = layer(x)
from_next_stage = torch.ones_like(y)
[for_stage_before] = torch.autograd.grad(y, x, from_next_stage, retain_graph=True)  # B
[layer.weight.grad] = torch.autograd.grad(y, layer.weight, from_next_stage)  # W, at any time
for_stage_before.shape, layer.weight.grad.shape

# %% [markdown]
# So a **split backward** has two actions of one slot each: `B(i)`, now the gradient of the input only,
# and later `W(i)`, that of the weights. (Without a W, `B(i)` computes both, as before.) 1F1B has idle
# slots at the end of every rank but the first: W can fill them. But what forward saved stays until W.
#
# Guess the bubble of a good split schedule that needs no more memory than 1F1B's rank 0.

# %%
# A guess, for exercise 7.17
### BEGIN SOLUTION
my_guess = 11
### END SOLUTION
labs.guess("7.17", "% of the step that a rank is idle, split backward, p = 4, m = 8", my_guess)

# %% [markdown]
# ### Exercise 7.17 · Zero bubble, H1
#
# *Difficulty 4 of 5 · 20 minutes · target: 3m + p − 1 slots if m ≥ p, and no rank has more than p
# micro-batches in flight*
#
# An action has `action.kind`, "F", "B" or "W", and `action.micro_batch`. So you can begin with
# `one_f_one_b(ranks, micro_batches)` and add W to its lists. When should rank r run W(i)?

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

# %% [markdown]
# <details><summary>Hint</summary>
#
# Rank 0 is idle in the middle, not at the end, and already has p micro-batches in flight: it has no
# room to delay a W. The last rank has one in flight, and is idle longest at the end. How many W can
# each of them keep for the end, if p may be in flight?
#
# Walk through the rank's list of 1F1B. After each B, add the W that is delayed by as many micro-batches
# as this rank can delay. At the end, add those that are left.
#
# </details>

# %%
lab.check_zb_h1(zb_h1)

# %%
lab.show_schedules(one_f_one_b, zb_h1, ranks=4, micro_batches=8)

# %% [markdown]
# **Notice:** the step is 2(p − 1) slots shorter. One part of that comes from splitting alone, since a
# gradient now leaves a rank after one slot, and not after two; the other from W at the end. The price:
# all ranks now have p micro-batches in flight, as only rank 0 had.

# %% [markdown]
# ## Whose clock?
#
# With about twice the memory, the Zero Bubble paper's second schedule, ZB-H2, has no idle slot
# *inside* any rank. But the last rank begins and ends later than the first. Is that a bubble? The
# paper takes the longest time of *one rank*, from its own first action to its last: the next step can
# begin in this step's corner. The cluster's clock, from the first begin to the last end, counts the
# corners.

# %%
lab.show_zb_h2(zb_h1, ranks=4, micro_batches=8)

# %% [markdown]
# **Notice:** ZB-H2's rows are full, from each rank's first box to its last. By the clock of one rank its
# bubble is zero; by the cluster's, its step is as long as that of ZB-H1. So ask of every published
# bubble: whose clock?

# %% [markdown]
# ## Does the simulation hold?
#
# The paper prints the times that it measured for F, B, W and a transfer, and bubble rates for four
# schedules. The next cell puts these times into the same simulation that has drawn your schedules:
# what a stage sends arrives one transfer after its action's end, and sending blocks nobody.

# %%
lab.show_published_bubbles("6.2B")

# %% [markdown]
# **Notice:** by the clock of one rank, three schedules agree with the paper to four digits; ZB-H2 does so
# by that clock only. The formulas are too low, because they leave transfers out. 1F1B-I is off by up
# to 0.002: the authors' script lets only the first of p micro-batches wait for a transfer between two
# chunks of a rank. `./scripts/bench pipeline` shows all 48 cells, and with that rule, too.

# %% [markdown]
# ## Stages on real ranks
#
# So far a schedule was data. Now ranks run it. Why would they? The cell computes what training
# Llama-3-8B takes on one GPU, what a quarter of its layers takes, and what has to cross between two
# stages for one sequence.

# %%
parameters, hidden, sequence = 8.03e9, 4096, 8192
print(f"16 bytes for each parameter: {16 * parameters / 1e9:.0f} GB on one GPU")
print(f"the same on each of 4 stages: {16 * parameters / 4 / 1e9:.0f} GB")
print(f"b·s·h of one sequence, in 16 bits: {2 * sequence * hidden / 1e6:.0f} MB")

# %% [markdown]
# So a rank keeps its own layers and sends one tensor of b·s·h. But how? In 1F1B two neighbours send
# to each other: one an output, the other a gradient. Below, both call `dist.send` first and receive
# afterwards. What will happen?

# %%
def exchange():
    tensor = torch.ones(1_000_000, device=lab.wire_device())
    other = 1 - dist.get_rank()
    dist.send(tensor, other)  # returns when the other rank has received
    dist.recv(tensor, other)


lab.diagnose(exchange, ranks=2)

# %% [markdown]
# **Notice:** both ranks wait in send, so neither comes to its receive. With NCCL the same happens, on
# the GPU's stream instead of in Python.

# %% [markdown]
# So a pipeline's sends must not wait. NCCL also has no tags: the k-th receive between two ranks gets
# the k-th send. The lab's links therefore use `dist.isend`, keep what they send until it has arrived,
# and have a process group of their own for each direction and for outputs and gradients. A rank waits
# only when it receives, and in a legal schedule those waits form no circle.

# %% [markdown]
# A list of actions reaches a rank as `Action(kind, micro_batch, stage)`. What the rank does with one
# of them is yours to write. `links` has three methods:
#
# | call | what it does |
# |:--|:--|
# | `links.receive(action)` | F: the output of the stage before; B: the gradient of the own output; None if there is none |
# | `links.send(action, tensor)` | F: to the next stage; B: to the stage before |
# | `links.is_last(action)` | whether it is the last stage, which computes the loss |

# %% [markdown]
# A stage is a module. This is the second of two stages of a small Llama: no embedding, but the last
# norm and the head. It takes hidden states and returns logits.

# %%
lab.make_stages(lab.small_llama(layers=3), layers=[1, 2], numbers=[1])[1]

# %% [markdown]
# The loss is a mean over tokens, but micro-batches need not have equally many: some targets are -100
# and do not count. Guess: one micro-batch has 10 targets and a mean loss of 4, another one has 90 and
# a mean loss of 2. What is the mean over all targets?

# %%
# A guess, for exercise 7.18
### BEGIN SOLUTION
my_guess = 2.2
### END SOLUTION
labs.guess("7.18", "mean loss of 10 targets at 4 and 90 at 2", my_guess)

# %%
(10 * 4 + 90 * 2) / (10 + 90)

# %% [markdown]
# **Notice:** the mean of the two means would be 3. Each micro-batch must give the *sum* of its losses,
# divided by the number of all targets.

# %% [markdown]
# ### Exercise 7.18 · One rank runs its list
#
# *Difficulty 4 of 5 · 30 minutes · target: 5 steps equal one process on 2, 3 and 4 ranks; each message
# b·s·h numbers*
#
# `stages[number]` are this rank's stages; `micro_batches[i]` has `"input_ids"` and `"targets"`.
# `lab.sum_of_losses(logits, targets)` sums the losses that count. The forward
# comes first: it returns what the backward will need, the stage's input and its output. On the last stage
# the output is the loss, divided by `targets`, the number in all micro-batches.

# %%
# Exercise 7.18: receive, compute, send
def run_forward(action, stages, batch, targets, links):
    ### BEGIN SOLUTION
    received = links.receive(action)
    given = batch["input_ids"] if received is None else received.requires_grad_()
    output = stages[action.stage](given)
    if links.is_last(action):
        return given, lab.sum_of_losses(output, batch["targets"]) / targets
    links.send(action, output)
    return given, output
    ### END SOLUTION

# %% [markdown]
# Now the whole list. `kept` holds what each forward returned, until its backward has used it: then it
# must be freed. Gradients of parameters add up in `.grad` by themselves. Return the sum of the losses
# as a number; on ranks without the last stage it is 0.

# %%
# Exercise 7.18: all actions of a rank, in order
def run_actions(actions, stages, micro_batches, links):
    kept, loss, targets = {}, 0.0, lab.count_targets(micro_batches)
    for action in actions:
        key, batch = (action.stage, action.micro_batch), micro_batches[action.micro_batch]
        ### BEGIN SOLUTION
        if action.kind == "F":
            kept[key] = run_forward(action, stages, batch, targets, links)
            loss += kept[key][1].item() if links.is_last(action) else 0.0
        else:
            given, output = kept.pop(key)
            output.backward(links.receive(action))
            if action.stage > 0:
                links.send(action, given.grad)
        ### END SOLUTION
    return loss

# %% [markdown]
# <details><summary>Hint</summary>
#
# What arrives has no history. Autograd stops there, and that is right: the rest of the graph is on
# another rank. But the gradient of the input is needed, so the received tensor must require gradients
# *before* it goes through the stage. The first stage receives nothing: its input is tokens.
#
# Backward: take out what the forward kept; receive the gradient of the output (on the last stage there
# is none: the loss has its own); run backward from the output with it; send the input's gradient on,
# unless the stage is the first.
#
# </details>

# %%
lab.check_run_actions(run_actions)

# %%
lab.show_training(run_actions, one_f_one_b, ranks=4, micro_batches=6)

# %% [markdown]
# **Notice:** no rank has the whole model, and the losses are those of one process. A rank in the middle
# sends two messages for each micro-batch, an output and a gradient; the first and the last rank send
# one. How many layers a rank has does not matter for its bytes.

# %% [markdown]
# ## Simulated and measured
#
# The simulation said when each action runs. Does it hold? The next cell runs your 1F1B on four ranks,
# measures every F and B, simulates with those times, and draws both. On a CPU each action sleeps until
# it has lasted 30 ms (a whole backward 60), because two cores cannot compute for four ranks at once.

# %%
lab.show_measured(one_f_one_b, ranks=4, micro_batches=6)

# %% [markdown]
# **Notice:** the same bubble stands in both timelines, and rank 0 has four micro-batches in flight, the
# last rank one. Of three measured steps the shortest is drawn; messages make its bubble a little larger
# than the formula's. The bytes are measured, too: what autograd keeps for backward, freed when the
# backward has run. The last rank's micro-batch is larger, because logits and loss are in it.

# %%
lab.show_measured(zb_h1, ranks=4, micro_batches=6)

# %% [markdown]
# **Notice:** W fills a part of the time in which 1F1B waits. B frees nothing here, because W still
# needs what the forward saved: so activations are in flight until W, and each rank has as many as the
# first one has in 1F1B.

# %% [markdown]
# ## Uneven stages
#
# All ranks wait for the slowest stage. The embedding is a look-up, which costs nearly nothing; the head
# multiplies with the whole vocabulary. In layers of Llama-3-8B, by the numbers multiplied for a token:

# %%
lab.llama_3_costs()

# %% [markdown]
# The same in seconds, forward and backward, for a small Llama with the same proportions on this
# machine. (The embedding's backward writes a gradient for the whole vocabulary. With as few tokens as
# here that is not nothing.)

# %%
seconds = lab.part_seconds()
{part: f"{1e3 * value:.2f} ms" for part, value in seconds.items()}

# %% [markdown]
# Llama-3-8B has an embedding, 32 layers and a head: 34 parts. With 8 stages of 4 or 5 parts each, in
# order, the last one gets three layers and the head. Guess: how much does the best split's slowest
# stage cost, in layers?

# %%
# A guess, for exercise 7.19
### BEGIN SOLUTION
my_guess = 5
### END SOLUTION
labs.guess("7.19", "layers that the slowest of 8 stages costs", my_guess)

# %% [markdown]
# ### Exercise 7.19 · Stages as equal as can be
#
# *Difficulty 3 of 5 · 20 minutes · target: the slowest stage is the fastest possible, in 300 cases*
#
# `costs` are those of consecutive parts: embedding, layers, head. Return how many parts each rank gets,
# in order, at least one each, such that the slowest stage costs as little as possible.

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

# %% [markdown]
# <details><summary>Hint</summary>
#
# Filling each stage up to the mean goes wrong at the end: what is left may be too much for the last
# rank. Try every size of the first stage instead, and split the rest in the best way over one rank
# less. The slowest stage is the larger of the two.
#
# The same rest comes up many times, so remember its answer (`functools.cache`).
#
# </details>

# %%
lab.check_split_layers(split_layers)

# %%
costs = lab.llama_3_costs()
parts = [costs["embedding"], *[costs["layer"]] * 32, costs["head"]]
lab.show_split(split_layers, parts, ranks=8)

# %% [markdown]
# **Notice:** with as many parts on each rank, the last one is the slowest: its head costs as much as
# 2.4 layers. A layer cannot be cut here, so 5 is the best; who has less only waits. Llama 3 was trained
# with one layer less on the first and on the last stage (Llama 3 paper, section 3.3.2): the first one
# also has the most micro-batches in flight.

# %% [markdown]
# ## One norm for all stages, one embedding on two of them
#
# Clipping needs the norm of the whole gradient, of which each rank has its stages' part. And where
# embedding and head are **tied**, one parameter lies on two ranks: each of its copies gets the gradient
# of its own use. If nothing is done, the copies become different at the first step. How large is that
# parameter in a small model with Llama-3's vocabulary?

# %%
vocabulary, hidden = 128_256, 2048
print(f"Llama-3.2-1B, tied: {vocabulary * hidden / 1e6:.0f} of 1,236 million parameters")

# %% [markdown]
# ### Exercise 7.20 · Clipping across stages
#
# *Difficulty 3 of 5 · 20 minutes · target: 5 steps of a tied Llama equal one process; one number and,
# on two ranks, the tied gradient travel*
#
# `parameters` are this rank's; some have no gradient. `group` has this pipeline's ranks, perhaps
# one of several. `tied` is the tied parameter's copy, or None; `tied_group` has its ranks. Sum its
# gradients, scale all in place to a norm of at most `max_norm`, and return the norm before.

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

# %% [markdown]
# <details><summary>Hint</summary>
#
# The order matters: the tied gradient must be whole before it is squared.
#
# Sum it over its two ranks. Sum the squares of all gradients of this rank; but on one of the two ranks
# leave the tied one out, because it would count twice. Sum the squares over all ranks, take the root,
# and scale every gradient by max_norm / norm, or by 1 if that is more.
#
# </details>

# %%
lab.check_clip_across_stages(clip_across_stages)

# %% [markdown]
# ## The same in torch
#
# `torch.distributed.pipelining` has the schedules as classes. Its runtime also reads a list like
# yours, as text with cells such as `0F0,1I2,1W2`, and inserts the sends and receives itself. That is
# private (`_load_csv`), so where a version of torch lacks it, the lab's own runner takes the list.

# %%
lab.show_runtimes(one_f_one_b, zb_h1)

# %% [markdown]
# **Notice:** all losses are the same. A schedule changes when a gradient is computed, not what it is.
# torch's classes scale gradients by 1/m for a loss that is a mean; here the loss is scaled already, so
# `scale_grads=False`. With fewer micro-batches than ranks they raise an error or hang; yours runs.

# %% [markdown]
# ## Three dimensions
#
# A model of 175 billion parameters needs more than 3 TB of states. Tensor parallelism divides them by 8, the
# GPUs that NVLink connects; a pipeline of 12 stages divides them by 12 more. That is a *replica* of 96
# GPUs. For 3,072 GPUs there are 32 replicas, which train as in notebooks 02 to 04:
#
# data 32 × pipeline 12 × tensor 8 = 3,072.
#
# Which rank does what follows from its number alone.

# %%
job = lab.JOBS["GPT-175B"]
states = 18 * (96 * job.layer_parameters + job.embedding_parameters)
print(f"{job}: {states / 1e12:.2f} TB of states, {states / 96 / 1e9:.1f} GB on each of 96 GPUs")

# %% [markdown]
# ## Who is where
#
# torch's `init_device_mesh("cuda", (32, 12, 8))` numbers the places so that the *last* dimension is
# the fastest: ranks 0 to 7 differ in the tensor dimension only. So they are neighbours on one node.
# Each layer all-reduces there four times; the pipeline sends one tensor.
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
# ### Exercise 7.21 · From a rank to its groups
#
# *Difficulty 2 of 5 · 12 minutes · target: right for meshes of one to four dimensions, whatever their
# sizes*
#
# `coordinates(rank, sizes)` gives the rank's place in each dimension, the slowest first.
# `group(rank, dimension, sizes)` gives the ranks that differ from it in that dimension alone, in the
# order of their places; dimensions count from 0.

# %%
# Exercise 7.21: places and groups
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
# **Notice:** on the left, the tensor-parallel group is inside one node. On the right, the same job with
# the dimensions in the other order: there the four all-reduces of every layer cross 8 nodes, over a link
# with about a tenth of the bytes per second.

# %% [markdown]
# ### Exercise 7.22 · A printed mistake
#
# *Difficulty 1 of 5 · 5 minutes · target: the wrong row of Llama 3's table, and every wrong row of four
# others*
#
# The product of the four sizes is the number of GPUs. One row of table 4 of the Llama 3 report (arXiv
# 2407.21783), as first printed, does not obey that. `wrong_rows(rows)` gives, for each such row, its
# number and the data-parallel size that is left. A row has `gpus`, `tensor`, `context`, `pipeline`,
# `data`.

# %%
for row in lab.LLAMA_3:
    print(row)

# %%
# Exercise 7.22: rows whose sizes do not fit
def wrong_rows(rows):
    ### BEGIN SOLUTION
    found = {}
    for number, row in enumerate(rows):
        left = row.gpus // (row.tensor * row.context * row.pipeline)
        if left != row.data:
            found[number] = left
    return found
    ### END SOLUTION

# %%
lab.check_wrong_rows(wrong_rows)

# %%
for row in lab.LLAMA_3:
    sequences = 2**24 / (row.sequence * row.data)
    print(f"16M tokens a step are {sequences:.0f} sequences on each replica, as printed: {row}")

# %% [markdown]
# **Notice:** the table also prints 16M tokens for every row, and 32, 16 and 16 sequences for each
# replica. The last row as printed would need 32; with your size it needs 16. Version 3 of the PDF
# (23 November 2024) prints your size, too. The copies of the text from which our row was read do not
# say which version they are.

# %% [markdown]
# ## Eight ranks
#
# Two replicas, each of two stages, each of two tensor-parallel ranks: 2 × 2 × 2. The pieces are those
# that you know: `parallelize_module` cuts a layer's matrices over tensor ranks (07a), `fully_shard`
# shards each piece over data ranks (04), and a runner like that of exercise 7.18 sits between stages.
#
# `stage.body.layers` are the layers of a stage of a small Llama. `mesh["tensor"]` and `mesh["data"]` are
# the meshes of one dimension, which both functions take.

# %% [markdown]
# Guess before you run: the layers' matrices are cut over 2 tensor and 2 data ranks, in 2 stages. Norms,
# embedding and head are cut over data ranks only. How many percent of all parameters does a rank keep?

# %%
# A guess, for exercise 7.23
### BEGIN SOLUTION
my_guess = 14
### END SOLUTION
labs.guess("7.23", "percent of the parameters on a rank", my_guess)

# %% [markdown]
# ### Exercise 7.23 · Data, pipeline and tensor parallel at once
#
# *Difficulty 3 of 5 · 15 minutes · target: five steps on 8 ranks equal to one process; a rank keeps at
# most 1/4 of its stage's matrices*
#
# Fill in the plan: a name of a module in a layer, such as "self_attn.q_proj", and `ColwiseParallel()` or
# `RowwiseParallel()`. Then apply both functions, in the right order, and return the stage.

# %%
# Exercise 7.23: a stage, cut in two more dimensions
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

# %% [markdown]
# <details><summary>Hint</summary>
#
# A column-parallel layer gives each rank its own part of the output, and a row-parallel one takes such
# a part. Which of a layer's seven matrices come first, and which two end a block?
#
# fully_shard gathers a layer just before it computes. So each layer is a unit of its own, and the rest
# of the stage is one more. It must find the parameters as they will stay, so it comes after the other cut.
#
# </details>

# %%
lab.check_three_dimensions(parallelize)

# %%
lab.show_three_dimensions(parallelize)

# %% [markdown]
# **Notice:** the pipeline sends least, a hidden state and its gradient for each micro-batch. FSDP sends
# most: it gathers every layer again for each of the 4 micro-batches. So in a pipeline FSDP keeps what it
# has gathered until the step ends (torch's own stages call `set_reshard_after_backward(False)`), or
# ZeRO-1 takes its place.

# %% [markdown]
# ## What one rank holds
#
# 32.7 GB of states fit on an A100; ZeRO-1 divides the optimizer's part by data × context ranks. But a
# rank also keeps activations: stage 0 keeps p micro-batches in flight and has the embedding; the last
# stage keeps one, and has the head.
#
# | `job` | is |
# |:--|:--|
# | `layer_parameters`, `embedding_parameters` | of one layer; of the embedding, and of the head |
# | `bytes_per_parameter` | with `.parameters`, `.gradients`, `.optimizer_state` |
# | `sequence`, `shape.vocabulary`, `shape.tied` | tokens; possible tokens; whether both are one matrix |

# %% [markdown]
# | `plan` | is |
# |:--|:--|
# | `data`, `tensor`, `pipeline`, `context` | sizes of the dimensions |
# | `sharding`, `micro_batch` | "DDP" or "ZeRO-1"; sequences of a micro-batch |
# | `layers(job, stage)` | layers of a stage |
# | `micro_batches(job)` | micro-batches of a step |
#
# `lab.layer_activations(job, plan)` gives the bytes that one layer saves for one micro-batch (notebook
# 01), and `lab.LOGIT_BYTES` the bytes for each logit at the peak of the loss.

# %%
plan = lab.Plan(data=32, pipeline=12, tensor=8, sharding="ZeRO-1", micro_batch=1)
print(plan, "|", plan.layers(job, 0), "layers,", plan.micro_batches(job), "micro-batches")
print(f"{lab.layer_activations(job, plan) / 1e6:.0f} MB of a layer; {job.bytes_per_parameter}")

# %%
# A guess, for exercise 7.24
### BEGIN SOLUTION
my_guess = 22
### END SOLUTION
labs.guess("7.24", "GB on a rank of stage 0", my_guess)

# %% [markdown]
# ### Exercise 7.24 · The memory of one rank
#
# *Difficulty 3 of 5 · 20 minutes · target: five parts, right to 0.2 % for 23 ranks of 10 plans*
#
# Return a dictionary with "parameters", "gradients", "optimizer state", "activations" and "logits", in
# bytes, for 1F1B with one chunk a stage. The norms, which tensor parallelism does not cut, are too
# small to matter. Tied embeddings on two stages are two matrices.

# %%
# Exercise 7.24: bytes of one rank of a stage
def rank_memory(job, plan, stage):
    ### BEGIN SOLUTION
    is_last, kept = stage == plan.pipeline - 1, job.bytes_per_parameter
    matrices = (stage == 0) + (is_last and (plan.pipeline > 1 or not job.shape.tied))
    own = plan.layers(job, stage) * job.layer_parameters + matrices * job.embedding_parameters
    own /= plan.tensor
    shards = plan.data * plan.context if plan.sharding == "ZeRO-1" else 1
    in_flight = min(plan.pipeline - stage, plan.micro_batches(job))
    tokens = plan.micro_batch * job.sequence / plan.context
    return {"parameters": kept.parameters * own, "gradients": kept.gradients * own,
            "optimizer state": kept.optimizer_state * own / shards,
            "activations": plan.layers(job, stage) * lab.layer_activations(job, plan) * in_flight,
            "logits": is_last * lab.LOGIT_BYTES * tokens * job.shape.vocabulary / plan.tensor}
    ### END SOLUTION

# %% [markdown]
# <details><summary>Hint</summary>
#
# Begin with the parameters of the rank: which layers, which of the two large matrices, divided by what?
# Three parts follow from that number. Which of them does ZeRO-1 divide, and by how many ranks?
#
# For activations, look at the timeline of 1F1B: when the first backward of stage s begins, how many
# micro-batches has it sent on? Can there be more than the step has?
#
# </details>

# %%
lab.check_rank_memory(rank_memory)

# %%
lab.show_stages(rank_memory, job, plan)

# %% [markdown]
# **Notice:** the stages' bars fall from left to right, because each stage keeps one micro-batch fewer
# in flight. The optimizer state, two thirds of all states in notebook 03, is less than 1 GB here,
# because ZeRO-1 divides it by 32. And three quarters of the GPU stay empty. So how many stages does
# this job need? The cell asks the same model, and that of a step's seconds from notebook 06.

# %%
for stages in (1, 2, 4, 6, 12, 24):
    fewer = lab.Plan(data=384 // stages, pipeline=stages, tensor=8)
    gb = sum(lab.largest_rank(job, fewer)[1].values()) / 1e9
    parts = lab.step_parts(job, fewer)
    print(f"PP {stages:2}: {gb:5.1f} GB, fits: {str(lab.fits(job, fewer)):5}, {parts.total:5.2f} s, "
          f"of them {parts.all_reduce:.2f} s all-reduce, {parts.bubble:.2f} s bubble")

# %% [markdown]
# **Notice:** for memory alone, two stages would do. More stages make the step shorter, because a
# rank's all-reduce sends the gradients of its own stage only. Beyond 12 that gains little, and the
# bubble grows.

# %% [markdown]
# Can the model be trusted? Below are five published steps of 175 billion parameters: two of
# Korthikanti et al. (2022, table 5), which the model was fitted to among others, and three of
# Megatron-LM that Jiang et al. measured (*MegaScale*, 2024, table 2), which it has not seen. They
# interleave 3 and 6 chunks (`chunks` of a plan), as in exercise 7.16. MegaScale prints neither
# micro-batch nor recomputation; 1 and selective are assumed.

# %%
for one in lab.STEPS_OF_175B:
    plain = lab.step_parts(one.job, replace(one.plan, chunks=1))
    print(f"{one.name:11} {one.job.gpus:6,} GPUs, {one.plan.chunks} chunks: {one.seconds:5.2f} s "
          f"published, {one.predicted:5.2f} s predicted, {one.error:+.1f} %; with one chunk "
          f"{plain.total:5.2f} s, {plain.bubble:.2f} s of it bubble")

# %% [markdown]
# **Notice:** with the chunks that these runs had, all five errors are below 8 %, and all predictions
# are too fast. With one chunk MegaScale's three would be closer, for a wrong reason: a bubble 3 or 6 times
# too long stands for what the model does not know. An error says little about a model that describes
# another run.

# %%
fewer, more = (lab.step_parts(one.job, one.plan) for one in lab.STEPS_OF_175B[3:])
print(f"published: {lab.STEPS_OF_175B[3].seconds / lab.STEPS_OF_175B[4].seconds:.2f} times as fast; "
      f"predicted: {fewer.total / more.total:.2f}")
for name in ("matmul", "all_reduce", "bubble"):
    shares = [getattr(parts, name) / parts.total for parts in (fewer, more)]
    print(f"{name:10} {shares[0]:6.1%} of the step on 3,072 GPUs, {shares[1]:6.1%} on 12,288")

# %% [markdown]
# **Notice:** four times the GPUs are less than four times as fast. The batch stays the same, so each
# rank computes a quarter; but it all-reduces as many gradients as before. The bubble stays, too, but
# with 6 chunks it is a small part.

# %% [markdown]
# ## The final rule
#
# DDP, ZeRO, FSDP, HSDP, tensor, pipeline, context: which of them for a given model, cluster and batch?
# One job has thousands of plans, and a bad one is many times slower than the best. Decide by models of
# memory and time.
#
# | Call | gives |
# |:--|:--|
# | `lab.plans(job)` | all plans that the sizes allow |
# | `lab.fits(job, plan)` | whether the largest rank fits on its GPU |
# | `lab.step_seconds(job, plan)` | seconds of a step |
# | `lab.impossible(job, plan)` | why a plan cannot be run |

# %% [markdown]
# A context rank has at least 1,024 tokens of a sequence. `schedule` is "1F1B" or "ZB-H1". `chunks` are
# interleaved under 1F1B, if they divide a stage's layers, and the stages divide the micro-batches.
# With FSDP a stage gathers its parameters once a step, and reduces a chunk's gradients when its
# micro-batches are done. Context-parallel ranks gather keys and values first, as Llama 3 does. Each
# GPU has a network card of its own, except in the job "one card".

# %%
for name in lab.JOBS:
    each = lab.JOBS[name]
    print(f"{sum(1 for _ in lab.plans(each)):6,} plans  {each}")

# %% [markdown]
# Guess before you search: 405 billion parameters in sequences of 8,192 tokens on 16,384 GPUs. How many
# GPUs does one replica of the fastest plan have?

# %%
# A guess, for exercise 7.25
### BEGIN SOLUTION
my_guess = 128
### END SOLUTION
labs.guess("7.25", "GPUs of a replica of 405B parameters", my_guess)

# %% [markdown]
# ### Exercise 7.25 · Choose
#
# *Difficulty 2 of 5 · 8 minutes · target: plans that fit for ten jobs, none 5 % slower than the fastest*
#
# `choose_plan(job)` returns the plan with the shortest step of those that fit, and None if none fits.

# %%
# Exercise 7.25: the final rule
def choose_plan(job):
    ### BEGIN SOLUTION
    fitting = [plan for plan in lab.plans(job) if lab.fits(job, plan)]
    return min(fitting, key=lambda plan: lab.step_seconds(job, plan), default=None)
    ### END SOLUTION

# %%
lab.check_choose_plan(choose_plan)

# %%
lab.show_plans(choose_plan)

# %% [markdown]
# **Notice:** read a row from left to right. Where one more dimension makes the number smaller, it is
# worth having; where the number stays, it is not. A small model on one node needs DDP and nothing
# else. No GPU holds 70B, so plain DDP has no number; 175B on 3,072 GPUs cannot be data parallel alone,
# because its batch has 1,536 sequences. The last column matters where a replica has few micro-batches
# for its stages.

# %% [markdown]
# One of these jobs has been run: Llama 3's, TP 8 × PP 16 × DP 128, at 400 TFLOP/s a GPU. How many
# seconds were that? It depends on the FLOPs that are counted: 6N a token, or attention's 12·L·h·s too.
# The report does not print its formula; it cites PaLM for its MFU, whose formula counts all of
# attention. The row of 131,072 tokens is a test, because attention is most of it.

# %%
for row in lab.LLAMA_3[1:]:
    for share, words in ((0, "6N alone"), (0.5, "half of attention"), (1, "all of attention")):
        seconds = lab.llama_3_seconds(row, share)
        print(f"{row.sequence:7,} tokens, {row.tflops} TFLOP/s: {seconds:5.2f} s with {words}")
parts = lab.step_parts(lab.LLAMA_3_STEPS[2].job, lab.LLAMA_3_STEPS[2].plan)
print(f"predicted at 131,072 tokens: {parts.matmul:.2f} s of products and {parts.attention:.2f} s "
      "of attention, without any communication")

# %% [markdown]
# **Notice:** at 131,072 tokens, 6N alone would leave less time than products and attention need
# without any communication. So the figures count attention, and 6.74 s is the published step; 6.22 s,
# which one finds by 6N, is not. Half of attention, as a causal kernel computes it, is not excluded by
# this test.

# %%
lab.show_published_plans(choose_plan)

# %% [markdown]
# **Notice:** for 16,384 GPUs and 8,192 tokens your search finds the plan that Meta ran, and its step
# is predicted within 5 %. At 131,072 tokens the model is 16 % too fast; it knows neither masks between
# documents nor how unevenly they load ranks. For 8,192 GPUs the real plan is 1.5 GB too large for our
# model: Meta freed tensors early. Next: what made the plan possible?

# %%
step = lab.LLAMA_3_STEPS[1]
for changes in ({}, {"chunks": 1}, {"chunks": 1, "schedule": "ZB-H1"}, {"sharding": "ZeRO-1"},
                {"recompute": "full"}):
    other = replace(step.plan, **changes)
    gb = sum(lab.largest_rank(step.job, other)[1].values()) / 1e9
    print(f"{lab.step_seconds(step.job, other):6.2f} s, {gb:5.1f} GB, "
          f"fits: {str(lab.fits(step.job, other)):5}, {other}")

# %% [markdown]
# **Notice:** with one chunk a stage the step is more than half as long again, because 16 micro-batches
# meet 16 stages; and the gradients of the complete stage stay unsharded, so it does not fit. ZB-H1 is
# shorter, but keeps p micro-batches on every stage. ZeRO-1 keeps all gradients. Recomputation fits
# easily, and computes a third more. Eight chunks solve both.

# %% [markdown]
# ## Optional: JAX's view
#
# A torch tensor does not say whether it is whole, a piece, or one rank's part of a sum. So a
# collective that is left out raises nothing. Below, a block of two matrix products is cut over 4
# ranks as in exercise 7.2: columns of `up`, rows of `down`. First the sum of y over ranks is left out
# (g of exercise 7.1), then that of x's gradient (f).

# %%
def left_out(with_sum):
    """Loss and gradient of x on this rank; nobody sums the gradient, and y only `with_sum`."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, up, down = (torch.tensor(a, device=labs.device()) for a in lab.block_arrays().values())
    x.requires_grad_()
    y = torch.relu(x @ up.chunk(ranks, 1)[rank]) @ down.chunk(ranks)[rank]
    if with_sum:  # in forward the sum, in backward nothing: g
        total = y.detach().clone()
        dist.all_reduce(total)
        y = y + (total - y).detach()
    loss = y.square().mean()
    loss.backward()
    return loss.item(), x.grad.cpu().numpy()

in_torch = [labs.launch(left_out, with_sum, ranks=4) for with_sum in (False, True)]
print("losses without the sum of y:", *(f"{loss:.3f}" for loss, _ in in_torch[0]))

# %% [markdown]
# In **JAX** the layout is a part of an array's type. Devices form a mesh with named axes, here one
# axis "n". A **`PartitionSpec`**, written `P`, names for each dimension of an array the axis that
# cuts it: `P(None, "n")` cuts columns, `P("n")` rows, `P()` nothing.
#
# `lab.run_jax` calls a function in a process of its own, which sees 4 CPU devices. Where JAX is
# missing, the cell says how to get it.

# %%
def types():
    import jax
    from jax.sharding import PartitionSpec as P
    jax.set_mesh(jax.make_mesh((4,), ("n",)))
    x, up, down = lab.place_arrays({"x": P(), "up": P(None, "n"), "down": P("n")})
    h = jax.nn.relu(x @ up)
    print("x", jax.typeof(x), "@ up", jax.typeof(up), "→ h", jax.typeof(h))
    print("h @ down, to be whole:", jax.typeof(jax.numpy.matmul(h, down, out_sharding=P())))
    h @ down

lab.run_jax(types)

# %% [markdown]
# **Notice:** `256@n` means that axis "n" cuts these 256 columns; JAX found the type of h by itself. It
# refuses `h @ down`: both are cut along the dimension that the product sums over, so each device has
# a part of the sum only. `out_sharding=P()` says that y must be whole, and so implies the all-reduce.

# %% [markdown]
# `shard_map` is closer to torch: its function sees the pieces of one device, and calls collectives
# itself; `psum` is the all-reduce. Types hold there, too: they say along which axes the values differ
# from device to device. So here are the same two omissions as in torch.

# %%
def in_pieces(with_sum):
    """Loss and gradient of x, as in left_out: nobody sums the gradient, and y only with_sum."""
    import jax
    from jax.sharding import PartitionSpec as P
    jax.set_mesh(jax.make_mesh((4,), ("n",)))

    def on_each_device(x, up, down):
        y = jax.nn.relu(x @ up) @ down
        return jax.lax.psum(y, "n") if with_sum else y

    block = jax.shard_map(on_each_device, out_specs=P())
    x, up, down = lab.place_arrays({"x": P(), "up": P(None, "n"), "down": P("n")})
    return jax.value_and_grad(lambda x: (block(x, up, down) ** 2).mean())(x)

in_jax = [lab.run_jax(in_pieces, with_sum) for with_sum in (False, True)]
in_jax[0]

# %%
lab.who_notices(in_torch, in_jax)

# %% [markdown]
# **Notice:** torch goes on without either sum. In JAX `out_specs=P()` promises the same y on all
# devices, which the types cannot confirm without `psum`. The sum of the gradient needs no line: where
# each device uses the whole x with its own weights, JAX inserts `pvary`, which is your f. Its backward
# is `psum`, and the backward of `psum` is `pvary`. (`check_vma=False` switches these types off; then
# JAX is as silent as torch.)

# %% [markdown]
# ### Exercise 7.26 · Three layouts, no collective
#
# *Difficulty 2 of 5 · 10 minutes · target: each device holds what DDP, FSDP and TP ask for; the
# compiled program has their collectives and no others*
#
# The program never changes: `h = relu(x @ up)`, then `y = matmul(h, down, out_sharding=...)` with
# your spec of y. x and y have 1024 rows, the tokens, and 64 columns; `up` is 64 × 256, `down`
# 256 × 64. The layout of h follows from those of x and `up`.

# %%
# Exercise 7.26: where each array lies, for three kinds of training
def layouts():
    """Layout -> array -> PartitionSpec, on a mesh with one axis "n"."""
    from jax.sharding import PartitionSpec as P
    ### BEGIN SOLUTION
    return {"DDP": {"x": P("n"), "up": P(), "down": P(), "y": P("n")},
            "FSDP": {"x": P("n"), "up": P("n"), "down": P("n"), "y": P("n")},
            "TP": {"x": P(), "up": P(None, "n"), "down": P("n"), "y": P()}}
    ### END SOLUTION

# %%
lab.check_layouts(layouts)

# %%
lab.show_layouts(layouts)

# %% [markdown]
# **Notice:** FSDP and TP may hold the same pieces of `down`; h makes the difference. Cut by tokens, it
# needs all of `down`, so the weight moves. Cut by columns, it fits the rows that a device has, so the
# sum moves. A wrong spec changes where numbers are and what travels, never the loss.
#
# How many kB will the devices all-reduce under TP, in forward and backward together? y and x have
# 1024 · 64 elements of 4 bytes.

# %%
# A guess, for exercise 7.26
### BEGIN SOLUTION
my_guess = 524
### END SOLUTION
labs.guess("7.26", "kB that TP all-reduces in forward and backward", my_guess)

# %%
lab.compare_collectives(layouts)

# %% [markdown]
# **Notice:** DDP and TP need the same in both. FSDP does not: on a CPU, JAX's compiler XLA has no
# reduce-scatter, so each device gets the whole sum of the gradients, twice the traffic, and keeps its
# piece. For GPUs XLA has one. It also gathers each weight once where torch gathers twice, because it
# keeps gathered weights until backward, and their memory with them. Under `jax.checkpoint` it gathers
# twice, too.

# %% [markdown]
# Two axes need no new code, only two names. On 2 × 4 devices: FSDP along "data", TP along "tensor".

# %%
def fsdp_and_tp():
    from jax.sharding import PartitionSpec as P
    return {"FSDP × TP": {"x": P("data"), "up": P("data", "tensor"),
                          "down": P("tensor", "data"), "y": P("data")}}

lab.show_layouts(fsdp_and_tp, {"data": 2, "tensor": 4})

# %% [markdown]
# **Notice:** each device holds an eighth of the weights, and the four devices of a row of the mesh
# work on the same half of the tokens. Your 2 × 2 × 2 run had one dimension more: a pipeline. No spec
# expresses it, because a spec says *where* an array is, and a schedule *when* it is computed.

# %% [markdown]
# ## A script of your own
#
# In torch a stage is a `PipelineStage` around any module that takes what the stage before it returns.
# A schedule runs it: `schedule.step` cuts a batch into micro-batches, sends, receives and computes
# backward; the optimizer is yours. Samples go into the first stage, targets into the last.

# %% [markdown]
# | In your file | is |
# |:--|:--|
# | `PipelineStage(module, stage_index, num_stages, device)` | this rank's stage |
# | `Schedule1F1B(stage, n_microbatches, loss_fn=loss_of)` | the list of 7.15, run by torch |
# | `schedule.step(batch)` | on the first stage; on one between `step()` |
# | `schedule.step(target=batch, losses=found)` | on the last; appends each micro-batch's loss |

# %% [markdown]
# ### Exercise 7.27 · `pipeline.py`
#
# *Difficulty 3 of 5 · 25 minutes · target: losses and parameters as one process has them, on 2 ranks and on
# 4; no more micro-batches in flight than 1F1B*
#
# The next cell writes the file. Fill in its two gaps: which layers a rank has, and the loop. `train`
# returns a list: each step's mean loss on the last rank, nothing on the others.

# %%
lab.write_script("pipeline.py")

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
lab.check_pipeline("pipeline.py")

# %%
lab.torchrun("pipeline.py", "--epochs", 4, ranks=2)

# %% [markdown]
# **Notice:** no rank has ever trained a layer of another one, and no gradient was reduced: data
# parallelism would be a second dimension of the mesh, as in 7.23. Together the saved files are the
# model.

# %% [markdown]
# ## How it usually goes wrong
#
# | Symptom | Cause |
# |:--|:--|
# | the first step hangs | two neighbours wait in send: use `isend` |
# | gradients m times too large | means of micro-batches added |
# | embedding and head drift apart | two copies, gradients not summed |
# | the last stage runs out of memory | the head counts as no layer |
# | bubble above the formula | uneven stages, or m < p |
# | tensor parallelism is slow | its group leaves the node: the mesh's order |

# %% [markdown]
# ## I can …
#
# - write a schedule as data, and name its bubble and its peak before I run it
# - say why zero bubble needs the backward in two parts
# - run a schedule on ranks without a deadlock
# - find a rank's groups from its number
# - name the parts of a rank's memory in a job of 3,072 GPUs
# - say which dimension a job needs next, and why
# - check a planner against a published run, with the schedule that the run had

# %% [markdown]
# ## What to read
#
# - Huang et al., *GPipe*, 2019, section 2.3: why does recomputation matter more here than elsewhere?
# - Narayanan et al., *Efficient Large-Scale Language Model Training on GPU Clusters*, 2021, section 3:
#   which two dimensions does takeaway 1 separate?
# - Qi et al., *Zero Bubble Pipeline Parallelism*, 2024, section 2: which assumption makes H1's memory
#   that of 1F1B?
# - Grattafiori et al., *The Llama 3 Herd of Models*, 2024, section 3.3.2: why is the order of its
#   dimensions TP, CP, PP, DP?

# %% [markdown]
# ## What comes next
#
# With thousands of GPUs something fails every few hours. **08** kills ranks, and the loss curve goes on.
