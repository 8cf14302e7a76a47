# %% [markdown]
# # 05 · FSDP profiling
#
# | | |
# |:--|:--|
# | **Time** | 110 minutes, and 40 for the optional exercise |
# | **Needs** | any machine with 2 cores; no GPU |
#
# FSDP moves each layer's parameters twice and its gradients once in every step. Does that *cost*
# time? A collective that is in flight while the rank computes costs none. You record real steps,
# read the traces with your own code, and find out why six slow runs are slow.

# %% [markdown]
# *On one GPU* two ranks share it, with gloo: the calls and their order are a node's. How much of
# them is hidden is not, because they pass through the CPU's memory.

# %% [markdown]
# ## You will be able to
#
# - tell total from exposed communication in a trace of torch's profiler;
# - say of every all-gather which unit it serves, in which phase, and who called it;
# - assert from a trace, by code, that prefetch works;
# - name the cause of a slow run, with the evidence.

# %% [markdown]
# ## One recorded step
#
# On 8 ranks, a step of Llama-2-7B in 16-bit moves 35 GB over the link of each GPU: two all-gathers
# and a reduce-scatter, 7/8 of 13.5 GB each. A network of 12.5 GB/s needs 2.8 s for that. An A100 at
# 40 % of its peak computes forward and backward of 4,096 tokens in 1.3 s. Whether you pay for the
# 2.8 s depends on *when* the collectives are in flight. A trace shows it.

# %%
import gzip
import json

import labs
import labs.fsdp_profiling as lab

labs.warm_up()
PRESET = lab.preset()  # or lab.preset(layers=6): any size can be changed
PRESET

# %% [markdown]
# A GPU's link moves bytes while the GPU computes. On a CPU, gloo moves them with the cores that the
# model needs. So there the lab gives each rank a **slow link**: every collective takes a latency and
# bytes / bandwidth of real time, one after the other, and leaves the cores free. The faster this
# machine computes, the faster its link.

# %% [markdown]
# On GPUs your real link is used, and the CPU runs ahead: it issues a block's work before the GPU gets
# to it. So the calls, which are the CPU's, lie far before the bars, which are the GPU's; forward's
# all-gathers are hidden without prefetch; and NVLink exposes little. Where a text below speaks of
# waiting, compare the *order* of the calls: it is the same on every machine.

# %% [markdown]
# Guess, before you record a step: during which share of it is an all-gather or a reduce-scatter in
# flight? A number between 0 and 1.

# %%
# A guess, for exercise 5.1
### BEGIN SOLUTION
my_guess = 0.5
### END SOLUTION
labs.guess("5.1", "share of the step that is communication", my_guess)

# %% [markdown]
# The next cell records up to five steps, until two took as long, and keeps the fastest: what disturbs
# a step makes it longer. If it took over a third longer or shorter than steps without the profiler, the machine was busy: it records
# again, and at last refuses to draw.

# %%
healthy = lab.record_fsdp(PRESET)
healthy

# %%
lab.show_timeline(healthy)

# %% [markdown]
# **Notice:** a numbered frame is one transformer block at work; the root holds the embeddings. A
# black tick is the call of a collective: it is **issued**. The bar is the time in which it is **in
# flight**, waiting for other ranks included.

# %% [markdown]
# In forward, a block's all-gather is issued before its own frame, and the rank waits. In backward it
# is issued before the frame of the block that computes *before* it (the last block has none). Its bar
# lies beneath that frame, or later if a reduce-scatter is on the link first.

# %% [markdown]
# `healthy` is a list of traces, one per rank. As files they open in Perfetto: the path stands above.
#
# | What | is |
# |:--|:--|
# | `trace.seconds` | how long the step took |
# | `trace.of(kind)` | a list of collectives of one kind, in the order in which they were issued; `trace.collectives` is a tuple of all |
# | `one.issued`, `one.begin`, `one.end` | of a collective, in seconds: its call, and the ends of its bar; also `one.seconds`, `one.bytes`, `one.kind` |
# | `trace.compute` | disjoint intervals, tuples `(begin, end)`, in which the rank computes |

# %%
gather = healthy[0].of("all_gather")[1]
print(f"issued at {gather.issued:.4f} s, in flight from {gather.begin:.4f} to {gather.end:.4f} s")
print(f"{gather.bytes:,} bytes; the rank computes in {len(healthy[0].compute)} intervals")

# %% [markdown]
# ## How much of the step is communication?
#
# On the slow link one collective is in flight at a time. On a GPU several can be, and one moment must
# not count twice. A *span* is anything with `begin`, `end` and `seconds`, such as a collective.

# %% [markdown]
# | Call | returns |
# |:--|:--|
# | `lab.union(spans)` | a list: the disjoint intervals that the spans cover together |
# | `lab.total_seconds(intervals)` | a number: how long they last together |
# | `lab.subtract(intervals, others)` | a list: the parts of `intervals` that no interval of `others` covers |

# %%
in_flight = lab.union(healthy[0].of("all_gather"))
print(f"{len(in_flight)} intervals of {1e3 * lab.total_seconds(in_flight):.1f} ms together")
lab.subtract([(0, 5)], [(1, 2), (4, 9)])

# %% [markdown]
# ### Exercise 5.1 · Share of communication
#
# *Difficulty 2 of 5 · 5 minutes · target: two shares, each between 0 and 1*

# %%
# Exercise 5.1: the share of the step in each kind of collective
def communication_share(trace):
    """{"all_gather": share, "reduce_scatter": share} of trace.seconds, each between 0 and 1."""
    shares = {}
    ### BEGIN SOLUTION
    for kind in ("all_gather", "reduce_scatter"):
        in_flight = lab.union(trace.of(kind))
        shares[kind] = lab.total_seconds(in_flight) / trace.seconds
    ### END SOLUTION
    return shares


# %%
lab.check_communication_share(communication_share)

# %%
lab.show_shares(healthy, communication_share)

# %% [markdown]
# ## How much of it is exposed?
#
# Communication is **exposed** while the rank does not compute: the rank only waits. Overlapped
# communication costs no time, however long it is in flight. So only the exposed part of the total can
# be gained back.
#
# ### Exercise 5.2 · Exposed share
#
# *Difficulty 2 of 5 · 5 minutes · target: one share, over collectives of every kind*

# %%
# Exercise 5.2: the share of the step in which the rank only waits for a collective
def exposed_share(trace):
    """A number: of trace.seconds, over all of trace.collectives."""
    ### BEGIN SOLUTION
    in_flight = lab.union(trace.collectives)
    return lab.total_seconds(lab.subtract(in_flight, trace.compute)) / trace.seconds
    ### END SOLUTION


# %%
lab.check_exposed_share(exposed_share)

# %%
lab.show_seconds(healthy)

# %% [markdown]
# **Notice:** compare the exposed milliseconds of both kinds, and the timeline. The all-gathers of
# forward are exposed, because the rank issues each of them when it already needs it. Those of
# backward, and the reduce-scatters, mostly lie beneath computing (if yours do not, the machine was
# busy: record again). Exposed are the first all-gather of backward, which nobody could prefetch, and
# the last reduce-scatters, after which no block computes.

# %% [markdown]
# ## Whose all-gather is it?
#
# FSDP2 puts labels around its calls: `FSDP::all_gather (transformer.h.2)` says whose parameters are
# gathered (no unit in brackets: the root's). The lab adds `labs::forward` and `labs::backward`.
#
# | Call | returns |
# |:--|:--|
# | `trace.enclosing(moment, beginning)` | a list of labels, outermost first: those that contain the moment (seconds) and whose names start with the string `beginning` |
# | `label.name` | a string; a label is a span, too |
# | `lab.unit_of(label.name)` | the unit, a string; `"root"` where none is named |

# %%
label = healthy[0].enclosing(healthy[0].seconds / 4, "labs::")[-1]
label.name, lab.unit_of("FSDP::all_gather (transformer.h.2)"), lab.unit_of("FSDP::all_gather")

# %% [markdown]
# ### Exercise 5.3 · Unit and phase of an all-gather
#
# *Difficulty 3 of 5 · 10 minutes · target: the right unit and phase for every all-gather, on a slow
# link too*
#
# A collective may be in flight long after its call. Which of its three moments (`issued`, `begin`,
# `end`) tells you the unit?

# %%
# Exercise 5.3: the unit and the phase that an all-gather belongs to
def attribute(trace, collective):
    """(unit, phase), for example ("transformer.h.2", "backward")."""
    ### BEGIN SOLUTION
    label = trace.enclosing(collective.issued, "FSDP::all_gather")[-1]
    for phase in ("forward", "backward"):
        if trace.enclosing(collective.issued, f"labs::{phase}"):
            return lab.unit_of(label.name), phase
    ### END SOLUTION


# %%
lab.check_attribute(attribute)

# %% [markdown]
# <details><summary>Hint</summary>
#
# A label encloses the *call* of a collective, not its flight: after the call the program goes on to
# other labels. First find the label that begins with `FSDP::all_gather` and lies around the call; if
# there are several, the innermost one is nearest to the call. It gives the unit. Then ask which of
# the two phases has a label around the same moment.
#
# </details>

# %%
lab.show_all_gathers(healthy, attribute)

# %% [markdown]
# **Notice:** every block is gathered twice, in forward and, in the opposite order, in backward. The
# root is gathered once: FSDP2 keeps the outermost unit's parameters after forward, because backward
# begins with them.

# %% [markdown]
# ## Who called it?
#
# With `with_stack=True` the profiler also records Python functions: `collective.stack` is a tuple of
# strings `"file(line of its def): function"`, outermost first. That makes a step longer, so it is
# used to find a line of code, not to measure.
#
# Somebody searched for a mistake in this model, and forgot to remove the code for it:
# `lab.watch_activations`, which runs on each rank before FSDP shards the model.

# %%
forgotten = lab.record_fsdp(PRESET, "something forgotten", stacks=True,
                            before_sharding=lab.watch_activations)
print(*forgotten[0].of("all_reduce")[0].stack[-5:], sep="\n")

# %% [markdown]
# ### Exercise 5.4 · The line that called
#
# *Difficulty 2 of 5 · 5 minutes · target: one string of the stack*
#
# Most frames of a stack belong to libraries. `lab.LIBRARIES` is a tuple of words: a frame that
# contains one of them is a library's.

# %%
# Exercise 5.4: the innermost frame that is no library's
def call_site(collective):
    """One of the strings of collective.stack, as it stands there."""
    ### BEGIN SOLUTION
    for frame in reversed(collective.stack):
        if not any(word in frame for word in lab.LIBRARIES):
            return frame
    ### END SOLUTION


# %%
lab.check_call_site(call_site)

# %%
lab.show_non_fsdp_collectives(forgotten, call_site)

# %% [markdown]
# **Notice:** compare the two columns of milliseconds. The bytes of one number take almost no time on
# the link, and yet the rank waits: for the latency, which stands in the output of `healthy`, and for
# the other ranks. Stacks make that wait longer, but not 10,000 times as long. The price of a small
# collective is the wait, not the bytes.

# %% [markdown]
# ## Prefetch, asserted
#
# Backward needs unit i-1 right after unit i. FSDP2, like FSDP1 with `BackwardPrefetch.BACKWARD_PRE`,
# issues the all-gather of i-1 *before* it computes the gradients of i, so that both happen at once.
#
# `lab.gradients_done(trace)` returns a list with a span for each unit, in backward's order, the root
# last: `span.name` is the unit, `span.begin` the moment at which its gradients were complete.

# %%
[(span.name, round(span.begin, 4)) for span in lab.gradients_done(healthy[0])]

# %% [markdown]
# ### Exercise 5.5 · Late units
#
# *Difficulty 4 of 5 · 15 minutes · target: no unit in `healthy`; every late one where prefetch fails*

# %%
# Exercise 5.5: the units that were not fetched in time
def fetched_late(trace):
    """A list: the names of the units whose all-gather in backward was issued only after the
    gradients of the unit before them were complete. The trace is of one step."""
    ### BEGIN SOLUTION
    issued = {}
    for gather in trace.of("all_gather"):
        unit, phase = attribute(trace, gather)
        if phase == "backward":
            issued[unit] = gather.issued
    done = lab.gradients_done(trace)
    return [after.name for before, after in zip(done, done[1:])
            if after.name in issued and issued[after.name] > before.begin]
    ### END SOLUTION


# %%
lab.check_fetched_late(fetched_late)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Two moments decide for each unit: the call of its all-gather in backward, and the moment at which
# the unit *before it in backward* had its gradients. First collect the first kind in a dictionary,
# with your `attribute`. Then walk through `gradients_done` in pairs of neighbours and compare. A
# unit that backward does not gather, like the root, cannot be late.
#
# </details>

# %% [markdown]
# ## Turn it off
#
# What does prefetch gain? Guess first, as a number between 0 and 100: how many percent of the
# throughput does training lose on this machine's link if backward fetches nothing ahead?

# %%
# A guess, for exercise 5.6
### BEGIN SOLUTION
my_guess = 10
### END SOLUTION
labs.guess("5.6", "what prefetch off costs, in percent of the throughput", my_guess)

# %% [markdown]
# | Call | does |
# |:--|:--|
# | `unit.set_modules_to_backward_prefetch([other, ...])` | says what `unit` fetches while it computes its gradients |
#
# An empty list means the default, the next unit. But to fetch what is already there does nothing.
#
# ### Exercise 5.6 · Backward without prefetch
#
# *Difficulty 3 of 5 · 10 minutes · target: every unit but the first of backward is late; nothing is
# gathered twice*

# %%
# Exercise 5.6: no unit fetches another in backward
def no_prefetch(blocks):
    """blocks: a list of the FSDP units of a model in forward order, without the root."""
    ### BEGIN SOLUTION
    for block in blocks:
        block.set_modules_to_backward_prefetch([block])
    ### END SOLUTION


# %%
lab.check_no_prefetch(no_prefetch)

# %% [markdown]
# <details><summary>Hint</summary>
#
# You cannot name *nothing*, because an empty list is the default. So which unit could a block name
# whose parameters are certainly there while the block computes its gradients? A unit that backward
# is done with is not: it is freed, and would be gathered again.
#
# </details>

# %%
late = lab.record_fsdp(PRESET, "no prefetch", configure=no_prefetch)
lab.show_prefetch(healthy, late)

# %% [markdown]
# **Notice:** in the upper picture, each all-gather of backward but the first has its tick at the
# beginning of the frame of the unit before. In the lower one, the tick comes after that frame *and*
# after the tick of that unit's reduce-scatter. There is one link, so the all-gather queues behind the
# reduce-scatter, and the rank waits for both.

# %% [markdown]
# ## And in forward?
#
# On a GPU the CPU runs ahead of the kernels, so the next all-gather is in the queue long before it
# is needed. Where it cannot run ahead, as on CPU ranks, you name what comes next:
# `unit.set_modules_to_forward_prefetch([next, ...])`. An empty list means: nothing.
#
# Every block that is gathered ahead takes its memory. How many ahead are worth it, if one
# all-gather takes less time than one block computes? Decide before you read the table below.

# %% [markdown]
# ### Exercise 5.7 · Forward prefetch, and its price
#
# *Difficulty 2 of 5 · 10 minutes · target: exactly `ahead` blocks are gathered ahead in forward;
# backward stays as it is*

# %%
# Exercise 5.7: each unit fetches the next `ahead` ones in forward
def forward_prefetch(blocks, ahead=1):
    """blocks: a list of the FSDP units of a model in forward order, without the root."""
    ### BEGIN SOLUTION
    for number, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[number + 1:number + 1 + ahead])
    ### END SOLUTION


# %%
lab.check_forward_prefetch(forward_prefetch)

# %%
lab.show_ahead(PRESET, forward_prefetch)

# %% [markdown]
# **Notice:** the lines below the table say what each block ahead saved, and for how much memory. The
# first takes waiting out of forward: its all-gather overlaps with the block before it. After that
# little is left to save, because an all-gather takes less time than a block computes: the root and
# the first block have hardly any computing before them to hide beneath. But the memory grows as much
# again.

# %% [markdown]
# Memory is also why FSDP1's `limit_all_gathers` limits how far the CPU runs ahead: to two all-gathers
# in flight, the fewest that still overlap.

# %% [markdown]
# ## What does it cost to get it wrong?
#
# A profiler slows steps down, so a trace is no measure of throughput. The next cell trains the three
# variants in turns, without the profiler, on the link as before (10 to 20 s).

# %%
variants = {"default prefetch": None, "no prefetch": no_prefetch,
            "forward prefetch too": forward_prefetch}
lab.show_throughput(PRESET, variants)

# %% [markdown]
# **Notice:** compare the percentage below the bars with your guess. The order of the calls alone
# makes the difference: all three send the same bytes and compute the same. The FSDP paper measured that backward prefetch makes a 175B model about 18 %
# faster: in terms of your guess, a loss of 1 − 1/1.18 = 15 % without it. The percentage depends on
# link and model, so where you read 20 to 30 %, ask on which link, and measure on yours.

# %% [markdown]
# ## Six slow runs
#
# Each has one thing wrong: an `.item()` in the step, units that are too small, one unit that is
# everything, prefetch off, a slow data loader, or a slow rank. The healthy run prefetches in forward
# too. All are recorded on one link, half as fast as before (on GPUs the real one), where mistakes
# cost more (20 to 60 s).
#
# An `.item()` makes the CPU wait. Here somebody asks all ranks, after each layer, for NaNs.

# %%
slow_runs = lab.slow_runs()
slow_runs

# %%
lab.explore_slow_runs(slow_runs)

# %% [markdown]
# Now name the causes by code. `run` and `healthy` are lists with one trace per rank, of one step.
#
# | What | is |
# |:--|:--|
# | `slow_runs.runs["A"]`, `slow_runs.healthy` | such lists, to try a rule on |
# | `trace.item_calls` | a tuple of spans, the calls of `.item()`; also of a healthy run: the model's own at the start of forward, and the optimizer's |
# | `trace.labelled("enumerate(DataLoader)")` | a list of spans: the data loader's labels |

# %%
lab.CAUSES  # cause -> the evidence to return with it

# %% [markdown]
# ### Exercise 5.8 · Diagnose
#
# *Difficulty 4 of 5 · 25 minutes · target: 8 runs named, with their evidence*
#
# It has two cells. First find the calls of `.item()` that are not the optimizer's. The check stands
# below the second cell.

# %%
# Exercise 5.8: the cause of a slow run, and the evidence
def own_item_calls(trace):
    """A list: the calls of .item() outside of the optimizer (its label is labs::optimizer)."""
    ### BEGIN SOLUTION
    return [item for item in trace.item_calls if not trace.enclosing(item.begin, "labs::optimizer")]
    ### END SOLUTION

# %% [markdown]
# Counts are certain: test them first. Timing is noisy, so compare the ranks of one run with each
# other, and the loading with its own step.
#
# The margins are wide, and a run with more noise is recorded again: a slow rank computes at least 5
# times as long as the others (healthy ranks differ by a factor of 2 at most). A slow loader takes
# over half of the step, any other under a tenth.

# %%
# Exercise 5.8, second half
def diagnose(run, healthy):
    """(cause, evidence), as lab.CAUSES lists them."""
    ### BEGIN SOLUTION
    busy = [lab.total_seconds(trace.compute) for trace in run]
    calls, gathers, late = own_item_calls(run[0]), run[0].of("all_gather"), fetched_late(run[0])
    loading = max(run[0].labelled("enumerate(DataLoader)"), key=lambda label: label.seconds)
    usual = len(healthy[0].of("all_gather"))
    rules = [(len(gathers) > usual, "tiny units", len(gathers)),
             (len(gathers) < usual, "one huge unit", max(gathers, key=lambda one: one.bytes)),
             (late, "no prefetch", late and late[0]),
             (len(calls) > len(own_item_calls(healthy[0])), "item", calls[-1]),
             (loading.seconds > 0.3 * run[0].seconds, "slow data loader", loading),
             (max(busy) > 3 * min(busy), "slow rank", busy.index(max(busy))),
             (True, "nothing", None)]
    return next((cause, evidence) for holds, cause, evidence in rules if holds)
    ### END SOLUTION

# %% [markdown]
# <details><summary>Hint</summary>
#
# Write one rule for each cause, and order them: what is counted before what is timed. Three causes
# change how many calls there are: compare with the healthy run. Your answer to 5.5 names a fourth.
# For the other two compare seconds *within* the run: the longest label of the loader with the step,
# the longest computing of a rank with the shortest.
#
# </details>
#
# The check records 8 runs with a model of another size (10 to 60 s): one for each cause, one more
# with another slow rank, and a healthy one.

# %%
lab.check_diagnose(diagnose)

# %%
lab.show_diagnoses(slow_runs, diagnose)

# %% [markdown]
# The step with the slow rank takes equally long on all ranks. How does the slow one show?

# %%
lab.show_waiting(slow_runs)

# %% [markdown]
# **Notice:** a slow rank shows on the *others*, in red: their collectives take long, because they
# wait in them for the slow rank. The slow rank itself hardly waits. So search for the rank that
# waits least, not for the one whose collectives take longest.

# %% [markdown]
# ## The same order on other links
#
# How long is a collective in flight on a given link? Each has a latency, however small it is; then
# its bytes pass. In a ring, each rank receives all pieces but its own.
#
# ### Exercise 5.9 · Seconds of a collective
#
# *Difficulty 2 of 5 · 5 minutes · target: one formula with two terms*

# %%
# Exercise 5.9: seconds of a ring all-gather, or reduce-scatter
def collective_seconds(nbytes, ranks, bandwidth, latency):
    """nbytes: of the whole tensor. bandwidth: bytes per second in one direction. latency: seconds
    of the whole collective."""
    ### BEGIN SOLUTION
    return latency + (ranks - 1) / ranks * nbytes / bandwidth
    ### END SOLUTION


# %%
lab.check_collective_seconds(collective_seconds)

# %% [markdown]
# The chart replays forward and backward of Llama-2-7B, a layer of 405 MB per unit, with your
# function. It is a *model, not a measurement*: the A100s compute at 40 % of their peak, each rank
# has one link, and nothing else is on it. The latencies are those of NCCL's own cost model.
#
# On which link does prefetch gain most: in milliseconds, and as a share of the step?

# %%
lab.show_links(collective_seconds)

# %% [markdown]
# **Notice:** NVLink exposes little even without prefetch. On PCIe an all-gather takes nearly as long
# as a layer's forward: with prefetch it is hidden, without it is not, so there the gain is the largest
# *share* of the step. On the network the gain is larger in milliseconds, but a smaller share, because
# over half of the communication is exposed in any order. Per layer of backward, prefetch gains the
# shorter of communication (both collectives) and computing.

# %% [markdown]
# ## How large should a unit be?
#
# On the network above, with each of a layer's 9 modules as a unit, a step pays 864 latencies: 92 ms.
# With layers as units it pays 96: 10 ms. The whole model as one unit exposes its whole all-gather,
# 0.94 s, and holds all parameters at once. Between the two, take the largest units of which two fit
# into memory: one computes, the next is in flight. Usually that is a transformer block.

# %% [markdown]
# ## Optional: read a trace without the lab
#
# On a cluster you get files, and nobody compares hundreds of steps in Perfetto by eye. But a trace is
# JSON, and `traceEvents` is a list of dictionaries:
#
# | key of an event | is |
# |:--|:--|
# | `ph` | its kind: `"X"` for events with a duration, all that you need |
# | `name`, `cat` | its name, and its category |
# | `ts`, `dur` | its begin and its duration, in microseconds |
# | `tid` | the thread, or the GPU's stream |

# %%
with gzip.open(healthy[0].path) as file:
    events = json.load(file)["traceEvents"]
print(f"{len(events):,} events")
next(event for event in events if event["name"] == "labs::step")

# %% [markdown]
# | What | on a CPU | on a GPU |
# |:--|:--|:--|
# | the step | category `user_annotation`, name `labs::step` | the same |
# | in flight | name begins with `link:` | category `kernel`, name begins with `nccl`; where ranks share a GPU, name begins with `gloo:` |
# | computing | category `cpu_op`, name begins with `aten::` | all other of category `kernel`, `gpu_memcpy` or `gpu_memset` |
#
# A file with category `kernel` is a GPU's.

# %% [markdown]
# gloo's threads call `aten::` operations too, to add and to copy: in a thread with a name that begins
# with `gloo:`, nothing is computing. And between two operations of a CPU Python runs, so there pauses
# of at most 0.5 ms count as computing. A GPU's pauses do not: kernels take microseconds.

# %% [markdown]
# ### Exercise 5.10 · Your own trace reader
#
# *Difficulty 4 of 5 · 40 minutes · target: the exposed seconds of the step in eight synthetic files and
# the recorded ones, without the lab*
#
# Only the last function is checked. The other two are a proposal.

# %%
# Exercise 5.10: the events of the step
def events_in_step(path):
    """A list of (begin, end, event): events with "ph" "X", cut to the step, in microseconds. path: a
    string that ends in .json or .json.gz."""
    ### BEGIN SOLUTION
    with (gzip.open if path.endswith(".gz") else open)(path, "rb") as file:
        events = [event for event in json.load(file)["traceEvents"] if event["ph"] == "X"]
    [step] = [event for event in events
              if (event["cat"], event["name"]) == ("user_annotation", "labs::step")]
    first, last = step["ts"], step["ts"] + step["dur"]
    cut = [(max(event["ts"], first), min(event["ts"] + event["dur"], last), event)
           for event in events]
    return [(begin, end, event) for begin, end, event in cut if begin < end]
    ### END SOLUTION

# %%
# Exercise 5.10, continued: intervals
def covered(intervals, gap=0):
    """Disjoint intervals (begin, end), in order, that cover the same. Those at most `gap` apart
    become one."""
    ### BEGIN SOLUTION
    found = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1] + gap:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found
    ### END SOLUTION

# %%
# Exercise 5.10, continued: in flight, and not computing
def exposed_seconds(path):
    ### BEGIN SOLUTION
    found, flights, busy = events_in_step(path), [], []
    gloo = {event["tid"] for *_, event in found if event["name"].startswith("gloo:")}
    gpu = any(event["cat"] == "kernel" for *_, event in found)
    for begin, end, event in found:
        name, on_gpu = event["name"], event["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")
        in_use = ("link:", "gloo:") if gpu else "link:"
        if name.startswith(in_use) or on_gpu and name.startswith("nccl"):
            flights.append((begin, end))
        elif on_gpu or not gpu and name.startswith("aten::") and event["tid"] not in gloo:
            busy.append((begin, end))
    busy = covered(busy, gap=0 if gpu else 500)
    both = sum(end - begin for begin, end in covered(flights + busy))
    return (both - sum(end - begin for begin, end in busy)) / 1e6
    ### END SOLUTION

# %%
lab.check_exposed_seconds(exposed_seconds)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Exposed is what collectives add to the time in which the rank computes. So you can do without
# subtracting intervals: how long do both cover together, and how long does computing alone?
#
# Outline: (1) find the step's label, and cut each event to it; (2) put each interval into one of two
# lists, by the table; (3) cover the second list, on a CPU with gaps of 500 microseconds; (4) take the
# time that both lists cover, less that of the second, in seconds.
#
# </details>

# %%
lab.show_own_reader(exposed_seconds, healthy, late)

# %% [markdown]
# **Notice:** both readers find the same milliseconds, to within 1 %. Yours needs no lab: for the files
# of another program, change the three names in the table. Your function also judges a run while it
# goes on: a few steps recorded on each node, and a line of output for each file.

# %% [markdown]
# ## A script of your own
#
# Notebook 05 has recorded steps for you. In a job the call is yours: a long run records a few steps in
# its midst, and each rank writes a file.
#
# | `torch.profiler` | does |
# |:--|:--|
# | `profile(schedule=…, with_stack=True)` | records; its `on_trace_ready`, a function of the profiler, is called after the active steps |
# | `schedule(wait=…, warmup=…, active=…, repeat=1)` | which steps: none, thrown away, kept |
# | `profiler.step()` | the step is over |
# | `profiler.export_chrome_trace(path)` | writes the trace |
# | `with record_function("forward"):` | a label |

# %% [markdown]
# ### Exercise 5.11 · `profile_fsdp.py`
#
# *Difficulty 2 of 5 · 15 minutes · target: one trace from each rank, of the active steps alone, with labels,
# collectives and stacks*
#
# The next cell writes the file. Fill in its two gaps. Each rank's file needs a name of its own.

# %%
lab.write_script("profile_fsdp.py")

# %% [markdown]
# <details><summary>Hint</summary>
#
# First gap: `on_trace_ready` is a function of the profiler. Without `repeat=1` the schedule begins
# again, and a second trace takes the first one's name.
#
# Second gap: `with profiler:` around the loop. A step ends where `profiler.step()` is called, so nothing
# of it may come after.
#
# </details>

# %%
lab.check_profile_fsdp("profile_fsdp.py")

# %%
lab.torchrun("profile_fsdp.py", ranks=2)

# %% [markdown]
# Open `traces/rank_0.json.gz` at *[ui.perfetto.dev](https://ui.perfetto.dev)*: your labels, FSDP's own
# (`FSDP::all_gather`), and below them the lines of your file.

# %% [markdown]
# ## I can …
#
# - record some steps of a job, and open the trace
# - compute the exposed share of a step from spans
# - explain why the moment of the call, not of the transfer, shows whose all-gather it is
# - write the assertion that fails when prefetch is off
# - say which rank is slow when all ranks take equally long

# %% [markdown]
# ## How it usually goes wrong
#
# - **Adding up durations**: collectives can overlap one another, and then a moment counts twice.
# - **Optimising hidden communication**: it costs no time, so nothing is gained.
# - **Blaming the rank with the longest all-gather**: it waited for the slow one.
# - **An empty list to turn backward's prefetch off**: it means the default, which prefetches.
# - **Measuring while recording**: the profiler slows a step down, most of all with stacks.

# %% [markdown]
# ## What to read
#
# | read | by | a question |
# |:--|:--|:--|
# | [PyTorch FSDP](https://arxiv.org/abs/2304.11277) | Y. Zhao et al., VLDB 2023, sections 3.3 and 5.2 | Why does one stream for all collectives make backward prefetch necessary? |
# | [fully_shard](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html) | PyTorch, `set_modules_to_backward_prefetch` | When would a unit fetch two others? |
# | [torch.profiler](https://docs.pytorch.org/docs/stable/profiler.html) | PyTorch, `schedule` | How do you record step 1000 of a long run? |

# %% [markdown]
# ## What comes next
#
# Notebook **06 Scaling**: the same step on more and more ranks. How long does it stay efficient?
