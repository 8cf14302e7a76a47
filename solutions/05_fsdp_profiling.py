# %% [markdown]
# # 05 · FSDP profiling
#
# | In short | This notebook |
# |:--|:--|
# | **Time** | 155 minutes, 45 more for optional parts |
# | **Needs** | any machine with 2 cores; no GPU |
#
# In every step FSDP all-gathers each layer's parameters twice and reduce-scatters its gradients once.
# Does that *cost* time? A collective that is in flight while the rank computes costs none. You record
# real steps, read their traces with your own code, and diagnose six slow runs.

# %% [markdown]
# <details><summary>On one GPU</summary>
#
# Two ranks share the GPU and communicate through gloo. The calls and their order are the same as on a
# node. Overlap is not, because gloo copies through host memory.
#
# </details>

# %% [markdown]
# ## You will be able to
#
# - distinguish total from exposed communication in a trace of `torch.profiler`;
# - say for every all-gather which unit it serves, in which phase, and which code called it;
# - assert from a trace, in code, that prefetch works;
# - diagnose a slow run, and give the evidence.

# %% [markdown]
# ## One recorded step with `torch.profiler`
#
# On 8 ranks, a 16-bit step of Llama-2-7B moves 35 GB over each GPU's link: two all-gathers and one
# reduce-scatter of 7/8 of 13.5 GB each. A network of 12.5 GB/s needs 2.8 s for that. An A100 at 40 % of
# its peak computes forward and backward of 4,096 tokens in 1.3 s. Whether the 2.8 s cost time depends on
# *when* the collectives are in flight. A trace shows it.

# %%
import gzip
import json
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

import labs
import labs.fsdp_profiling as lab

labs.warm_up()
PRESET = lab.preset()  # or lab.preset(layers=6): any size can be changed
PRESET

# %% [markdown]
# A GPU's link transfers bytes while the GPU computes. On a CPU, gloo transfers them with the same cores
# that the model needs. Therefore, on a CPU the lab gives each rank a **slow link**: one after the other,
# each collective takes a latency plus bytes / bandwidth of real time, and uses no core. The link's
# bandwidth is chosen in proportion to this machine's speed.

# %% [markdown]
# <details><summary>On several GPUs</summary>
#
# Your real links are used, and the CPU runs ahead: it issues a block's work before the GPU gets to it.
# Three things differ from the text below. The calls (on the CPU) lie far before the bars (on the GPU).
# Forward's all-gathers overlap without prefetch. NVLink exposes little. Where the text says that a rank
# waits, compare the *order* of the calls, which is the same on every machine.
#
# </details>

# %% [markdown]
# `lab.record_fsdp` trains FSDP2 on real ranks. Each rank records its steps with your function.
#
# | `torch.profiler` | does |
# |:--|:--|
# | `with profile(activities=[…], record_shapes=True) as profiler:` | records; the activities are `ProfilerActivity.CPU` and, where a GPU is, `ProfilerActivity.CUDA`; shapes give the bytes of collectives |
# | `with record_function("labs::step"):` | a label: the lab's reader takes the step's begin and end from it |
# | `profiler.export_chrome_trace(…)` | writes the file, after the profiler has stopped |

# %% [markdown]
# Two things are special to several ranks:
#
# - Profilers do not start at the same time on all ranks. Without a barrier between the start and the step,
#   the step's first collective waits for the last rank.
# - Each rank writes a file of its own.

# %% [markdown]
# ### Exercise 5.12 · Recording one step
#
# *Difficulty 2 of 5 · 10 minutes · target: one trace from each rank, of one labelled step that all begin
# together*
#
# `train_one_step()` trains one step, and returns when its last kernel has run.

# %%
# Exercise 5.12: one step under torch.profiler, on every rank
def record_step(train_one_step, path, **options):
    """Calls train_one_step() once, and writes the trace of this rank to `path`, a string. options:
    further arguments of profile, such as with_stack=True; empty at times."""
    ### BEGIN SOLUTION
    activities = [ProfilerActivity.CPU]  # gloo's threads are the CPU's; NCCL's kernels are CUDA's
    if torch.accelerator.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, record_shapes=True, **options) as profiler:
        dist.barrier()
        with record_function("labs::step"):
            train_one_step()
    profiler.export_chrome_trace(path)
    ### END SOLUTION


# %%
lab.check_record_step(record_step)

# %% [markdown]
# With the slow link, `options` contains an `experimental_config`. By default, Kineto, the profiler's
# library, leaves out Python threads that began before the recording, and the slow link is such a thread.

# %% [markdown]
# ## Communication share of a step
#
# Before you record a step, guess: during which share of the step is an all-gather or a reduce-scatter in
# flight? Write a number between 0 and 1.

# %%
# A guess, for exercise 5.1
### BEGIN SOLUTION
my_guess = 0.5
### END SOLUTION
labs.guess("5.1", "share of the step that is communication", my_guess)

# %% [markdown]
# The next cell records up to five steps, until two take equally long, and keeps the fastest one, because
# disturbances only make a step longer. It also times steps without the profiler. If the recorded step
# is more than a third longer or shorter than those, the machine was busy: the cell records again, and
# after several attempts it draws nothing. Until 5.12 is filled in, the lab records with its own function.

# %%
healthy = lab.record_fsdp(PRESET, record=record_step)
healthy

# %%
lab.show_timeline(healthy)

# %% [markdown]
# A numbered frame is the time in which one transformer block computes; the root holds the embeddings. A
# black tick is the moment at which the rank calls a collective: it is **issued**. The bar is the time in
# which it is **in flight**, including the time in which it waits for other ranks.

# %% [markdown]
# **Notice:** in forward, a block's all-gather is issued just before the block's own frame, and the rank
# waits.
#
# In backward, it is issued before the frame of the block that computes *before* it (the last block has
# none). Its bar lies beneath that frame, or later if a reduce-scatter occupies the link.

# %% [markdown]
# `healthy` is a list of traces, one per rank, read from your files (paths above).
#
# | What | is |
# |:--|:--|
# | `trace.seconds` | the duration of the step |
# | `trace.of(kind)` | a list of collectives of one kind, in order of issue; `trace.collectives` is a tuple of all |
# | `one.issued`, `one.begin`, `one.end` | of a collective, in seconds: its call, and both ends of its bar; also `one.seconds`, `one.bytes`, `one.kind` |
# | `trace.compute` | disjoint intervals, tuples `(begin, end)`, in which the rank computes |

# %%
gather = healthy[0].of("all_gather")[1]
print(f"issued at {gather.issued:.4f} s, in flight from {gather.begin:.4f} to {gather.end:.4f} s")
print(f"{gather.bytes:,} bytes; the rank computes in {len(healthy[0].compute)} intervals")

# %% [markdown]
# ## Exposed and overlapped communication
#
# Communication is **exposed** while the rank does not compute: the rank only waits. Overlapped
# communication costs no time, however long it is in flight. So an optimisation can save only the exposed
# part.
#
# On the slow link, one collective is in flight at a time. On a GPU, several can be in flight at the same
# time, and that time must not be counted twice.

# %% [markdown]
# A *span* is anything with `begin`, `end` and `seconds`, for example a collective.
#
# | Call | returns |
# |:--|:--|
# | `lab.union(spans)` | a list of disjoint intervals: the times that at least one span covers |
# | `lab.total_seconds(intervals)` | a number: the sum of their durations |
# | `lab.subtract(intervals, others)` | a list: the parts of `intervals` that no interval of `others` covers |

# %%
in_flight = lab.union(healthy[0].of("all_gather"))
print(f"{len(in_flight)} intervals of {1e3 * lab.total_seconds(in_flight):.1f} ms together")
lab.subtract([(0, 5)], [(1, 2), (4, 9)])

# %% [markdown]
# ### Exercise 5.1 · Total and exposed communication
#
# *Difficulty 2 of 5 · 10 minutes · target: two shares, each between 0 and 1, of each kind and of all
# collectives*

# %%
# Exercise 5.1: shares of the step in which collectives are in flight, and are exposed
def communication_share(trace):
    """{"all_gather": (in flight, exposed), "reduce_scatter": (in flight, exposed), "all": (…)}:
    shares of trace.seconds. "all" is of trace.collectives, whatever their kinds."""
    shares = {}
    ### BEGIN SOLUTION
    groups = {kind: trace.of(kind) for kind in ("all_gather", "reduce_scatter")}
    groups["all"] = trace.collectives
    for kind, collectives in groups.items():
        in_flight = lab.union(collectives)
        exposed = lab.subtract(in_flight, trace.compute)
        shares[kind] = (lab.total_seconds(in_flight) / trace.seconds,
                        lab.total_seconds(exposed) / trace.seconds)
    ### END SOLUTION
    return shares


# %%
lab.check_communication_share(communication_share)

# %%
lab.show_shares(healthy, communication_share)

# %%
lab.show_seconds(healthy)

# %% [markdown]
# **Notice:** the all-gathers are exposed for more milliseconds than the reduce-scatters.
#
# Compare with the timeline. Forward's all-gathers are exposed, because the rank issues each of them only
# when it needs it. Backward's all-gathers and the reduce-scatters mostly overlap with computing (if yours
# do not, the machine was busy: record again).

# %% [markdown]
# Two parts of backward's communication are always exposed. The first all-gather of backward is never
# prefetched, because no unit computes before it in backward. After the last reduce-scatters no block
# computes.

# %% [markdown]
# ## Overlap on a GPU: CUDA streams and events
#
# A **stream** is a queue of work on a GPU; work in two streams can run at the same time. FSDP issues
# all-gathers on a stream of its own. An *event* marks a point in a stream: the compute stream waits for
# the event before it reads the gathered parameters. The GPU waits, the CPU does not. On a CPU, threads of
# gloo or of the slow link do this job.

# %% [markdown]
# ```python
# compute = torch.cuda.current_stream()
# side, gathered = torch.cuda.Stream(), torch.cuda.Event()
#
# side.wait_stream(compute)               # the shard must be complete before it is sent
# with torch.cuda.stream(side):
#     full = shard.new_empty(dist.get_world_size() * shard.numel())
#     dist.all_gather_single(full, shard)
#     gathered.record()
# x = block(x)                            # overlaps with the all-gather
# compute.wait_event(gathered)
# x = next_block(x, full)
# full.record_stream(compute)             # see below
# ```
#
# `full` was allocated on `side`. Without `record_stream`, `side` may reuse its memory while `compute`
# still reads it. FSDP1 calls it; FSDP2 keeps a reference until an event instead.

# %% [markdown]
# ## Attributing all-gathers to FSDP units
#
# FSDP2 puts labels around its calls. `FSDP::all_gather (transformer.h.2)` names the unit whose parameters
# are gathered; without a name in brackets it is the root. The lab adds `labs::forward` and
# `labs::backward`.
#
# | Call | returns |
# |:--|:--|
# | `trace.enclosing(moment, beginning)` | a list of the labels that contain the moment (seconds) and whose names start with the string `beginning`; outermost first |
# | `label.name` | a string; a label is a span, too |

# %%
label = healthy[0].enclosing(healthy[0].seconds / 4, "labs::")[-1]
label.name, [one.name for one in healthy[0].enclosing(gather.issued, "FSDP::")]

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
    """(unit, phase), for example ("transformer.h.2", "backward") or ("root", "forward")."""
    ### BEGIN SOLUTION
    label = trace.enclosing(collective.issued, "FSDP::all_gather")[-1]
    unit = "root"
    if "(" in label.name:
        unit = label.name.split("(")[1].rstrip(")")
    for phase in ("forward", "backward"):
        if trace.enclosing(collective.issued, f"labs::{phase}"):
            return unit, phase
    ### END SOLUTION


# %%
lab.check_attribute(attribute)

# %% [markdown]
# <details><summary>Hint</summary>
#
# A label encloses the *call* of a collective, not the time in flight: after the call the program enters
# other labels. First find the labels that begin with `FSDP::all_gather` and enclose the call. If there
# are several, take the innermost one. Its name gives the unit, in brackets. Then find the phase: which of
# the two labels encloses the same moment?
#
# </details>

# %%
lab.show_all_gathers(healthy, attribute)

# %% [markdown]
# **Notice:** every block is gathered twice: in forward, and in the opposite order in backward.
#
# The root is gathered once. FSDP2 does not reshard the outermost unit after forward, because backward
# starts with it.

# %% [markdown]
# ## Call stacks: `with_stack=True`
#
# With `with_stack=True` the profiler also records Python functions. `collective.stack` is a tuple of
# strings `"file(line of its def): function"`, outermost first. Recording stacks makes a step longer, so
# use it to find a line of code, not to measure.
#
# Someone debugged this model and forgot to remove the debugging code: `lab.watch_activations`, which each
# rank calls before FSDP shards the model.

# %%
forgotten = lab.record_fsdp(PRESET, "something forgotten", stacks=True, record=record_step,
                            before_sharding=lab.watch_activations)
print(*forgotten[0].of("all_reduce")[0].stack[-5:], sep="\n")

# %% [markdown]
# ### Exercise 5.4 · Call sites, and their exposed time
#
# *Difficulty 3 of 5 · 10 minutes · target: one string of the stack; exposed seconds of each such string*
#
# Most frames of a stack belong to libraries. `lab.LIBRARIES` is a tuple of words: a frame that contains
# one of them belongs to a library.
#
# A collective that FSDP calls is called inside of a label that begins with `FSDP::`. All others are
# somebody's own.

# %%
# Exercise 5.4: who calls a collective
def call_site(collective):
    """The innermost frame that is no library's: one string of collective.stack, unchanged."""
    ### BEGIN SOLUTION
    for frame in reversed(collective.stack):
        if not any(word in frame for word in lab.LIBRARIES):
            return frame
    ### END SOLUTION


# %%
# Exercise 5.4, continued: how long the rank waits for the calls of each call site
def exposed_by_call_site(trace):
    """{call site: exposed seconds of all its collectives}, for those that FSDP does not call."""
    seconds = {}
    ### BEGIN SOLUTION
    for collective in trace.collectives:
        if not trace.enclosing(collective.issued, "FSDP::"):
            exposed = lab.subtract([(collective.begin, collective.end)], trace.compute)
            site = call_site(collective)
            seconds[site] = seconds.get(site, 0) + lab.total_seconds(exposed)
    ### END SOLUTION
    return seconds


# %%
lab.check_call_site(call_site, exposed_by_call_site)

# %% [markdown]
# <details><summary>Hint</summary>
#
# First function: the outermost frame stands first, so search from the end of the stack.
#
# Second function: go through all collectives, of every kind. Leave out those whose call lies in one of FSDP's
# labels, as in 5.3. For each of the others, subtract the intervals of computing from its own interval, and
# add the seconds to those of its call site.
#
# </details>

# %%
lab.show_non_fsdp_collectives(forgotten, call_site, exposed_by_call_site)

# %% [markdown]
# **Notice:** compare the two columns of milliseconds: the 4 bytes take almost no time on the link, but
# the rank waits for milliseconds.
#
# It waits for the latency (printed with `healthy`) and for the other ranks. Stacks make the wait longer,
# but not by a factor of 10,000. So the cost of a small collective is the wait, not the bytes.

# %% [markdown]
# ## Backward prefetch
#
# Backward needs unit i−1 right after unit i. FSDP2, like FSDP1 with `BackwardPrefetch.BACKWARD_PRE`,
# issues the all-gather of i−1 *before* it computes the gradients of i, so that the two overlap.
#
# `lab.gradients_done(trace)` returns a list with a span for each unit, in backward's order, the root
# last. `span.name` is the unit, and `span.begin` is the moment at which its gradients were complete.

# %%
[(span.name, round(span.begin, 4)) for span in lab.gradients_done(healthy[0])]

# %% [markdown]
# ### Exercise 5.5 · Units gathered late
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
# For each unit, compare two moments: the call of its all-gather in backward, and the moment at which the
# gradients of the unit *before it in backward* were complete. First collect the calls in a dictionary,
# with your `attribute`. Then go through `gradients_done` in pairs of neighbours and compare. A unit that
# backward does not gather, such as the root, cannot be late.
#
# </details>

# %% [markdown]
# ## Backward without prefetch
#
# How much does prefetch gain? Guess a number between 0 and 100: by how many percent does the throughput
# on this machine's link fall if backward prefetches nothing?

# %%
# A guess, for exercise 5.6
### BEGIN SOLUTION
my_guess = 10
### END SOLUTION
labs.guess("5.6", "what prefetch off costs, in percent of the throughput", my_guess)

# %% [markdown]
# | Call | sets which units `unit` prefetches | an empty list means |
# |:--|:--|:--|
# | `unit.set_modules_to_backward_prefetch([other, …])` | while it computes its gradients | the default: the unit before it |
# | `unit.set_modules_to_forward_prefetch([other, …])` | while it computes its forward | none, which is the default |
#
# The all-gathers are issued in the order of the list. Prefetching a unit that is already unsharded is a
# no-op.

# %% [markdown]
# ### Exercise 5.6 · Number of prefetched units
#
# *Difficulty 3 of 5 · 20 minutes · target: exactly as many units are prefetched as the two numbers say;
# nothing is gathered twice*

# %%
# Exercise 5.6: how many units each unit prefetches, in forward and in backward
def set_prefetch(blocks, forward=0, backward=1):
    """blocks: a list of the FSDP units of a model in forward order, without the root. Each
    prefetches the next `forward` ones in forward, and the `backward` ones before it in backward."""
    ### BEGIN SOLUTION
    for number, block in enumerate(blocks):
        following = blocks[number + 1:number + 1 + forward]
        preceding = blocks[max(0, number - backward):number][::-1]  # the nearest one first
        block.set_modules_to_forward_prefetch(following)
        # An empty list would mean the default. A unit that is computing is there already.
        block.set_modules_to_backward_prefetch(preceding or [block])
    ### END SOLUTION


# %%
lab.check_set_prefetch(set_prefetch)

# %% [markdown]
# <details><summary>Hint</summary>
#
# For each block, make two lists: the blocks after it, and the blocks before it in backward's order. At both
# ends of the model the lists are shorter.
#
# With `backward=0` you cannot name *no unit*, because an empty list means the default. Which unit is
# certainly unsharded while a block computes its gradients? A unit whose backward is finished is not: it has
# been resharded and would be gathered again.
#
# </details>

# %%
no_prefetch = partial(set_prefetch, backward=0)
late = lab.record_fsdp(PRESET, "no prefetch", configure=no_prefetch, record=record_step)
lab.show_prefetch(healthy, late)

# %% [markdown]
# **Notice:** without prefetch (the lower picture) the tick of each all-gather in backward comes after the
# frame of the previous unit, *and* after the tick of that unit's reduce-scatter.
#
# With prefetch (the upper picture) it stands at the beginning of that frame, except for the first one.
# There is one link, so a late all-gather queues behind the reduce-scatter, and the rank waits for both.

# %% [markdown]
# ## Forward prefetch
#
# On a GPU the CPU runs ahead of the kernels, so the next all-gather is in the queue long before it is
# needed. Where the CPU cannot run ahead, as on CPU ranks, you name the next units yourself, as
# `set_prefetch(blocks, forward=1)` does.
#
# Every prefetched block takes memory. How many should you prefetch, if one all-gather takes less time
# than one block computes? Decide before you read the table below.

# %%
lab.show_ahead(PRESET, set_prefetch)

# %% [markdown]
# **Notice:** the lines below the table say how many milliseconds each further block saves, and how much
# memory it takes.
#
# With one block ahead, its all-gather overlaps with the block before it. After that little is left to
# save, because an all-gather takes less time than a block computes. What remains exposed are mostly the
# root's and the first block's all-gathers, before which almost nothing computes. The second block takes
# as much memory as the first.

# %% [markdown]
# Memory is also the reason for FSDP1's `limit_all_gathers`. It limits how far the CPU runs ahead: to two
# all-gathers in flight, the minimum that still overlaps
# (*[FSDP paper](https://arxiv.org/abs/2304.11277)*).

# %% [markdown]
# ## Throughput with and without prefetch
#
# A profiler slows steps down, so a trace does not measure throughput. The next cell trains three variants
# in turns, without the profiler, on the same link as before (10 to 20 s).

# %%
variants = {"default prefetch": None, "no prefetch": no_prefetch,
            "forward prefetch too": partial(set_prefetch, forward=1)}
lab.show_throughput(PRESET, variants)

# %% [markdown]
# **Notice:** compare the percentage above the bars with your guess. Only the order of the calls differs:
# all three variants send the same bytes and compute the same.
#
# The *[FSDP paper](https://arxiv.org/abs/2304.11277)* measured that backward prefetch makes a 175B model
# about 18 % faster; that is a loss of 1 − 1/1.18 = 15 % without it. The percentage depends on the link
# and the model. If you read 20 to 30 %, ask for the link, and measure on yours.

# %% [markdown]
# ## Diagnosing six slow runs
#
# Each run has one fault: an `.item()` in the step, units that are too small, the full model as one unit,
# no prefetch, a slow data loader, or a slow rank. The healthy run also prefetches in forward. All runs
# use one link, half as fast as before (on GPUs the real one), so that faults cost more (20 to 60 s).
#
# `.item()` makes the CPU wait. Here it checks for NaNs after each layer.

# %%
slow_runs = lab.slow_runs()
slow_runs

# %%
lab.explore_slow_runs(slow_runs)

# %% [markdown]
# Now diagnose the runs in code. `run` and `healthy` are lists with one trace per rank, of one step.
#
# | What | is |
# |:--|:--|
# | `slow_runs.runs["A"]`, `slow_runs.healthy` | such lists, to try a rule on |
# | `trace.item_calls` | a tuple of spans, the calls of `.item()`. A healthy run has some, too: the model's at the start of forward, and the optimizer's |
# | `trace.labelled("enumerate(DataLoader)")` | a list of spans: the data loader's labels |

# %%
lab.CAUSES  # cause -> the evidence to return with it

# %% [markdown]
# ### Exercise 5.8 · Diagnosis of a slow run
#
# *Difficulty 4 of 5 · 25 minutes · target: 8 runs named, with their evidence*
#
# The exercise has two cells. In the first one, find the calls of `.item()` that are not the optimizer's.
# The check is below the second cell.

# %%
# Exercise 5.8: the cause of a slow run, and the evidence
def own_item_calls(trace):
    """A list: the calls of .item() outside of the optimizer (its label is labs::optimizer)."""
    ### BEGIN SOLUTION
    return [item for item in trace.item_calls if not trace.enclosing(item.begin, "labs::optimizer")]
    ### END SOLUTION

# %% [markdown]
# Counts do not vary: test them first. Times do: compare the ranks of one run with each other, and the
# data loader with the step of the same run.
#
# The margins are wide, because timing is noisy. A slow rank computes at least 5 times as long as the
# others (healthy ranks differ by a factor of 2 at most). A slow data loader takes more than half of the
# step, any other less than a tenth.

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
# The check records 8 runs with a model of another size (10 to 60 s): one for each cause, one more with
# another slow rank, and a healthy one.

# %%
lab.check_diagnose(diagnose)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Write one rule for each cause, and test counts before times. Three causes change the number of calls:
# compare with the healthy run. Your answer to 5.5 finds a fourth cause. For the other two compare seconds
# *within* the run: the data loader's longest label with the step, and the rank that computes longest with
# the rank that computes shortest.
#
# </details>

# %%
lab.show_diagnoses(slow_runs, diagnose)

# %% [markdown]
# With a slow rank, the step takes equally long on all ranks. How can you find the slow rank?

# %%
lab.show_waiting(slow_runs)

# %% [markdown]
# **Notice:** the exposed time (red) of a slow rank is on the *other* ranks.
#
# Their collectives take long, because they wait for the slow rank; the slow rank itself hardly waits. So
# search for the rank that waits least, not for the rank whose collectives take longest.

# %% [markdown]
# ## Link bandwidth and latency
#
# How long is a collective in flight on a given link? Every collective has a latency, even a very small
# one. In addition, its bytes take time. In a ring, each rank receives all pieces but its own.
#
# In backward, each layer computes, and has two equally long collectives on one link: an all-gather of the
# next layer, and a reduce-scatter. In your two timelines, which of the three overlap with prefetch, and which
# without it?

# %% [markdown]
# ### Exercise 5.9 · Time of a collective, and of a layer
#
# *Difficulty 2 of 5 · 10 minutes · target: a formula with two terms; one layer with and without prefetch*

# %%
# Exercise 5.9: seconds of a ring all-gather, or reduce-scatter
def collective_seconds(nbytes, ranks, bandwidth, latency):
    """nbytes: of the full tensor. bandwidth: bytes per second in one direction. latency: seconds
    of the complete collective."""
    ### BEGIN SOLUTION
    return latency + (ranks - 1) / ranks * nbytes / bandwidth
    ### END SOLUTION


def layer_seconds(in_flight, computing, prefetch):
    """Seconds of one layer of backward. in_flight: seconds of one of its two collectives."""
    ### BEGIN SOLUTION
    communicating = 2 * in_flight  # the next layer's all-gather, and the reduce-scatter
    if prefetch:
        return max(computing, communicating)
    return computing + communicating
    ### END SOLUTION


# %%
lab.check_collective_seconds(collective_seconds, layer_seconds)

# %% [markdown]
# The chart uses your first function to model forward and backward of Llama-2-7B, with one layer of 405 MB per
# unit. It is a *model, not a measurement*: the A100s compute at 40 % of their peak, and each rank has one
# link, which nothing else uses. The latencies are those of NCCL's own cost model.
#
# On which link does prefetch gain most: in milliseconds, and as a share of the step?

# %%
lab.show_links(collective_seconds, layer_seconds)

# %% [markdown]
# **Notice:** prefetch gains the largest *share* of the step on PCIe. There an all-gather takes nearly as
# long as a layer's forward, so prefetch hides it.
#
# NVLink exposes little even without prefetch. On the network prefetch gains more milliseconds, but a
# smaller share: over half of the communication is exposed in any order. Per layer of backward (the lines
# below the chart), the gain is the shorter of two times: communication (both collectives) and computing.

# %% [markdown]
# ## Unit size
#
# Take the network above. With each of a layer's 9 modules as a unit, a step pays 864 latencies: 92 ms.
# With each layer as a unit it pays 96: 10 ms. With the full model as one unit, its complete all-gather is
# exposed, 0.94 s, and all parameters are unsharded at once. So choose the largest units of which two fit
# into memory: one computes while the next is gathered. Usually that is a transformer block.

# %% [markdown]
# ## Optional: parsing the trace file
#
# On a cluster you get files, and nobody compares hundreds of steps in Perfetto by eye. A trace file is
# JSON, and its `traceEvents` is a list of dictionaries:
#
# | key of an event | is |
# |:--|:--|
# | `ph` | its kind: `"X"` for events with a duration, the only ones that you need |
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
# If a file has the category `kernel`, it was recorded on a GPU.

# %% [markdown]
# gloo's threads call `aten::` operations, too, to add and to copy. So do not count threads that have an
# event whose name begins with `gloo:` as computing.
#
# Between two operations on a CPU, Python runs. So on a CPU, gaps of at most 0.5 ms count as computing. On
# a GPU, gaps do not count, because kernels take microseconds.

# %% [markdown]
# ### Exercise 5.10 · Trace parser
#
# *Difficulty 4 of 5 · 40 minutes · target: the exposed seconds of the step in eight synthetic files and
# the recorded ones, without the lab*
#
# Only the last function is checked. The other two are a proposal.

# %%
# Exercise 5.10: the events of the step
def events_in_step(path):
    """A list of (begin, end, event): events with "ph" "X", clipped to the step, in microseconds.
    path: a string that ends in .json or .json.gz."""
    ### BEGIN SOLUTION
    with (gzip.open if path.endswith(".gz") else open)(path, "rb") as file:
        events = [event for event in json.load(file)["traceEvents"] if event["ph"] == "X"]
    [step] = [event for event in events
              if (event["cat"], event["name"]) == ("user_annotation", "labs::step")]
    first, last = step["ts"], step["ts"] + step["dur"]
    clipped = [(max(event["ts"], first), min(event["ts"] + event["dur"], last), event)
               for event in events]
    return [(begin, end, event) for begin, end, event in clipped if begin < end]
    ### END SOLUTION

# %%
# Exercise 5.10, continued: intervals
def covered(intervals, gap=0):
    """Disjoint intervals (begin, end), in order, that cover the same times. Those at most `gap`
    apart become one."""
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
    found, in_flight, busy = events_in_step(path), [], []
    gloo = {event["tid"] for *_, event in found if event["name"].startswith("gloo:")}
    gpu = any(event["cat"] == "kernel" for *_, event in found)
    for begin, end, event in found:
        name, on_gpu = event["name"], event["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")
        in_use = ("link:", "gloo:") if gpu else "link:"
        if name.startswith(in_use) or on_gpu and name.startswith("nccl"):
            in_flight.append((begin, end))
        elif on_gpu or not gpu and name.startswith("aten::") and event["tid"] not in gloo:
            busy.append((begin, end))
    busy = covered(busy, gap=0 if gpu else 500)
    both = sum(end - begin for begin, end in covered(in_flight + busy))
    return (both - sum(end - begin for begin, end in busy)) / 1e6
    ### END SOLUTION

# %%
lab.check_exposed_seconds(exposed_seconds)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Exposed communication is the time that collectives add to the time in which the rank computes. So you
# need no subtraction of intervals: how long do collectives and computing cover together, and how long
# does computing alone?
#
# Outline: (1) find the step's label, and clip each event to it; (2) put each interval into one of two
# lists, by the table; (3) merge the second list, on a CPU with gaps of 500 microseconds; (4) take the time
# that both lists cover together, minus that of the second, in seconds.
#
# </details>

# %%
lab.show_own_reader(exposed_seconds, healthy, late)

# %% [markdown]
# **Notice:** both readers find the same milliseconds, to within 1 %.
#
# Your parser does not need the lab. For files of another program, change the three names in the table. Your
# function can also monitor a running job: record a few steps on each node, and print one line per file.

# %% [markdown]
# ## Profiling a training script
#
# Your `record_step` records one step that the lab has chosen. A long run chooses a few of its own steps by a
# schedule, and records them with stacks.
#
# | `torch.profiler` | does |
# |:--|:--|
# | `profile(schedule=…, with_stack=True)` | records; its `on_trace_ready`, a function of the profiler, is called after the active steps |
# | `schedule(wait=…, warmup=…, active=…, repeat=1)` | which steps: not recorded, discarded, kept |
# | `profiler.step()` | marks the end of a step |

# %% [markdown]
# ### Exercise 5.11 · `profile_fsdp.py`
#
# *Difficulty 2 of 5 · 15 minutes · target: one trace from each rank, of the active steps alone, with labels,
# collectives and stacks*
#
# The next cell writes the file. Fill in its two gaps. Each rank's file needs a name of its own.

# %%
lab.write_script("profile_fsdp.py")

# %%
lab.check_profile_fsdp("profile_fsdp.py")

# %% [markdown]
# <details><summary>Hint</summary>
#
# First gap: `on_trace_ready` is a function of the profiler. Without `repeat=1` the schedule starts again,
# and a second trace overwrites the first one.
#
# Second gap: `with profiler:` around the loop. `profiler.step()` ends a step, so call it last in the loop.
#
# </details>

# %%
lab.torchrun("profile_fsdp.py", ranks=2)

# %% [markdown]
# Now the lab's reader, and your functions of 5.1 and 5.4, read the files that your script has written. They
# have no slow link, and gloo's all-gathers block where FSDP2 calls them.

# %%
for path in sorted(Path("traces").glob("*.json*")):
    trace = lab.load(path)
    print(trace, f"exposed: {communication_share(trace)['all'][1]:.0%}", sep="\n    ")
    print("    the last all-gather's call site:", call_site(trace.of("all_gather")[-1]))

# %% [markdown]
# Open a file of `traces` at *[ui.perfetto.dev](https://ui.perfetto.dev)*. It shows your labels, FSDP's own
# labels (`FSDP::all_gather`), and below them the functions of your script.

# %% [markdown]
# ## I can …
#
# - record a step on every rank with `torch.profiler`, or some steps of a job, and open the traces
# - compute the exposed share of a step from spans
# - explain why the moment of the call, not the time in flight, shows which unit an all-gather serves
# - explain what a stream, an event and `record_stream` are for
# - write the assertion that fails when prefetch is off
# - find the slow rank when all ranks take equally long

# %% [markdown]
# ## How it usually goes wrong
#
# - **Adding up durations**: collectives can overlap one another, and then time is counted twice.
# - **Optimising overlapped communication**: it costs no time, so nothing is gained.
# - **Blaming the rank with the longest all-gather**: it waited for the slow one.
# - **An empty list to turn backward prefetch off**: it means the default, which prefetches.
# - **Measuring throughput while recording**: the profiler slows a step down, most of all with stacks.

# %% [markdown]
# ## What to read
#
# | read | by | a question |
# |:--|:--|:--|
# | [PyTorch FSDP](https://arxiv.org/abs/2304.11277) | Y. Zhao et al., VLDB 2023, sections 3.3 and 5.2 | Why does one stream for all collectives make backward prefetch necessary? |
# | [fully_shard](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html) | PyTorch, `set_modules_to_backward_prefetch` | When would a unit prefetch two others? |
# | [torch.profiler](https://docs.pytorch.org/docs/stable/profiler.html) | PyTorch, `schedule` | How do you record step 1000 of a long run? |

# %% [markdown]
# ## What comes next
#
# Notebook **06 Scaling**: the same step on more and more ranks. Up to how many ranks is it efficient?
