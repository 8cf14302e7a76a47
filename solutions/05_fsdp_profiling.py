# %% [markdown]
# # 05 · FSDP profiling
#
# **90 minutes** · any machine with 2 cores, no GPU
#
# FSDP gathers every layer's parameters just before they are used, twice per step, and that takes
# time. Whether it *costs* time is another question: a collective that is in flight while the rank
# computes costs nothing. You record real steps, read the traces with your own code, and find out
# why six slow runs are slow.
#
# *On a rented 8×A100 node: 3 minutes of compute, about $1.12.*

# %% [markdown]
# ## You will be able to
#
# - tell total from exposed communication in a trace of torch's profiler;
# - say of every all-gather which unit it serves, in which phase, and who called it;
# - assert from a trace, by code, that prefetch works;
# - name the cause of a slow run, with the evidence.

# %% [markdown]
# ## One recorded step

# %%
import labs
import labs.fsdp_profiling as lab

labs.warm_up()
PRESET = lab.preset()  # or lab.preset(layers=6): any size can be changed
PRESET

# %% [markdown]
# `torch.profiler` records what a rank does: each operation with its begin and duration, the labels
# that FSDP2 puts around its own work, and each collective twice: when it is **issued** (called) and
# while it is **in flight** (on gloo's threads here, as an NCCL kernel on a GPU).
#
# On a GPU, all-gathers run on a stream of their own. A CPU has no streams, so the lab asks FSDP to
# issue them asynchronously; their order is that of a GPU.

# %%
healthy = lab.record_fsdp(PRESET)
healthy

# %%
lab.show_timeline(healthy)

# %% [markdown]
# **Notice:** a numbered frame is one unit at work, a transformer block; the root holds the
# embeddings. A black tick is the call of a collective, the bar is when it is in flight. In forward
# a unit's tick stands right before its own frame; in backward, from the second unit on, right
# before the frame of the unit before it.

# %% [markdown]
# The same trace, as a file, opens in Perfetto: the path stands above. Everything that you compute
# below, you can also see there.
#
# A `trace` is one rank's. `trace.of(kind)` lists its collectives, each with three moments in
# seconds: `issued` (the call), `begin` and `end` (in flight). `trace.compute` holds the intervals,
# (begin, end), in which the rank computed. `lab.union(spans)` makes intervals from spans that may
# overlap, `lab.total_seconds(intervals)` adds up their seconds, `lab.subtract(intervals, others)`
# removes the others.

# %% [markdown]
# ## How much of the step is communication?
#
# Guess first: during which share of the recorded step is an all-gather or a reduce-scatter in
# flight? A number between 0 and 1.

# %%
# A guess, for exercise 5.1
### BEGIN SOLUTION
my_guess = 0.5
### END SOLUTION
labs.guess("5.1", "share of the step that is communication", my_guess)

# %% [markdown]
# Two all-gathers can be in flight at once. A moment counts once.

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


lab.check_communication_share(communication_share)

# %%
lab.show_shares(healthy, communication_share)

# %% [markdown]
# ## How much of it is exposed?
#
# Communication is **exposed** while the rank does not compute: it only waits. Overlapped
# communication costs nothing, however long it takes. So the total says how busy the link is; only
# the exposed part can be gained back.

# %%
# Exercise 5.2: the share of the step in which the rank only waits for a collective
def exposed_share(trace):
    """Of trace.seconds, over collectives of every kind (trace.collectives)."""
    ### BEGIN SOLUTION
    in_flight = lab.union(trace.collectives)
    return lab.total_seconds(lab.subtract(in_flight, trace.compute)) / trace.seconds
    ### END SOLUTION


lab.check_exposed_share(exposed_share)

# %%
lab.show_seconds(healthy)

# %% [markdown]
# **Notice:** every reduce-scatter lies between two frames: FSDP2 calls it synchronously and relies
# on a GPU's streams, so here the rank waits. gloo runs each as an all-reduce, and the file calls it
# so: calls and bytes are those of a GPU, seconds are not.

# %% [markdown]
# ## Whose all-gather is it?
#
# FSDP2 puts labels around its calls: `FSDP::all_gather (transformer.h.2)` says whose parameters are
# gathered (no brackets: the root's); the lab adds `labs::forward` and `labs::backward`.
# `trace.enclosing(moment, beginning)` returns the labels that contain the moment and whose names
# begin with `beginning`, outermost first. `lab.unit_of(label.name)` returns the unit, `"root"`
# where none is named.
#
# A collective may be in flight long after its call. Which of its three moments counts?

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


lab.check_attribute(attribute)

# %%
lab.show_all_gathers(healthy, attribute)

# %% [markdown]
# **Notice:** every block is gathered twice, in forward and, in the opposite order, in backward. The
# root is gathered once: FSDP2 keeps the outermost unit's parameters after forward, because backward
# begins with them.

# %% [markdown]
# ## Who called it?
#
# With `with_stack=True` the profiler also records Python functions: `collective.stack`,
# outermost first, as `"file(line of its def): function"`. That costs time, so it is used to find
# a line of code, not to measure.
#
# Somebody searched for a mistake in this model, and forgot to remove the code for it.

# %%
forgotten = lab.record_fsdp(PRESET, "something forgotten", stacks=True,
                            before_sharding=lab.watch_activations)
forgotten

# %% [markdown]
# Most frames of a stack belong to libraries. `lab.LIBRARIES` lists words that tell them apart.

# %%
# Exercise 5.4: the innermost frame that is no library's
def call_site(collective):
    """One of the strings of collective.stack, as it stands there."""
    ### BEGIN SOLUTION
    for frame in reversed(collective.stack):
        if not any(word in frame for word in lab.LIBRARIES):
            return frame
    ### END SOLUTION


lab.check_call_site(call_site)

# %%
lab.show_non_fsdp_collectives(forgotten, call_site)

# %% [markdown]
# **Notice:** each call sends a single number, and yet every rank stops for it: the cost of a small
# collective is the wait, not the bytes.

# %% [markdown]
# ## Prefetch, asserted
#
# Backward needs unit i-1 right after unit i. FSDP2, like FSDP1 with
# `BackwardPrefetch.BACKWARD_PRE`, issues the all-gather of i-1 *before* it computes the gradients
# of i, so that both happen at once.
#
# `lab.gradients_done(trace)` returns a span for each unit in backward's order: `name` is the unit,
# `begin` the moment at which its gradients were complete.

# %%
# Exercise 5.5: the units that were not fetched in time
def fetched_late(trace):
    """Names of the units whose all-gather in backward was issued only after the gradients of the
    unit before them were complete. The trace is of one step."""
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


lab.check_fetched_late(fetched_late)

# %% [markdown]
# ## Turn it off
#
# `unit.set_modules_to_backward_prefetch([other, ...])` says what a unit fetches while it computes
# its gradients. There is no switch for *nothing*: an empty list means the default, the next unit.
# But fetching what is already there does nothing.

# %%
# Exercise 5.6: no unit fetches another in backward
def no_prefetch(blocks):
    """blocks: the FSDP units of a model in forward order, without the root."""
    ### BEGIN SOLUTION
    for block in blocks:
        block.set_modules_to_backward_prefetch([block])
    ### END SOLUTION


lab.check_no_prefetch(no_prefetch)

# %%
late = lab.record_fsdp(PRESET, "no prefetch", configure=no_prefetch)
lab.show_prefetch(healthy, late)

# %% [markdown]
# **Notice:** in the upper picture, the tick of each all-gather in backward stands at the begin of
# the frame of the unit before, and its bar can lie beneath that frame. In the lower one, the tick
# comes after the frame and after its reduce-scatter: the rank has nothing left to compute while it
# waits. Seconds change from run to run, this order does not.

# %% [markdown]
# ## And in forward?
#
# On a GPU the CPU runs ahead of the kernels, so the next all-gather is in the queue long before it
# is needed. Where the CPU cannot run ahead, forward prefetch helps:
# `unit.set_modules_to_forward_prefetch([next])`. Prefetching more costs memory, since more units
# are gathered at once; FSDP1 limits that with `limit_all_gathers`.

# %%
# Exercise 5.7: each unit fetches the next one in forward
def forward_prefetch(blocks):
    """blocks: the FSDP units of a model in forward order, without the root."""
    ### BEGIN SOLUTION
    for block, following in zip(blocks, blocks[1:]):
        block.set_modules_to_forward_prefetch([following])
    ### END SOLUTION


lab.check_forward_prefetch(forward_prefetch)

# %%
ahead = lab.record_fsdp(PRESET, "forward prefetch", configure=forward_prefetch)
lab.show_prefetch(ahead)

# %% [markdown]
# ## What does it cost to get it wrong?
#
# Much material says 20 to 30 % of the throughput. The FSDP paper measured that prefetch makes a
# 175B model about 18 % faster: without it, 15 % are lost. What do you expect on this machine? Give
# percent.

# %%
# A guess, for exercise 5.7
### BEGIN SOLUTION
my_guess = 10
### END SOLUTION
labs.guess("5.7", "what prefetch off costs, in percent of the throughput", my_guess)

# %%
variants = {"default prefetch": None, "no prefetch": no_prefetch,
            "forward prefetch too": forward_prefetch}
lab.show_throughput(PRESET, variants)

# %% [markdown]
# **Notice:** on a CPU the bars may come in any order. gloo's threads compute on the same cores as
# the model, so a hidden all-gather slows down the computing that hides it. On a GPU the link works
# without the cores. The lab can imitate that: every all-gather really completes a tenth of a step
# later, and the cores are free meanwhile.

# %%
lab.show_throughput(PRESET, variants, all_gather_delay=0.1)

# %% [markdown]
# **Notice:** now the order of the calls decides, unless this machine has much else to do: a unit
# that is prefetched is there when it is needed. Only forward prefetch saves the wait in forward,
# because this CPU cannot run ahead. The percentage depends on the link: on your machines you have
# to measure it.

# %% [markdown]
# ## Six slow runs
#
# Each has one thing wrong with it: `.item()` in the step, units that are too small, one unit that
# is everything, prefetch off, a slow data loader, a slow rank. Look at the pictures first. On a
# GPU an `.item()` waits until all queued kernels are done; a CPU has no queue, so here you see only
# the call.

# %%
slow_runs = lab.slow_runs()
slow_runs

# %%
lab.explore_slow_runs(slow_runs)

# %% [markdown]
# Now name the causes by code. `run` and `healthy` are lists with one trace per rank, of one step.
# `trace.item_calls` are the calls of `.item()`; some are the optimizer's own, and some the model's.
# `trace.labelled("enumerate(DataLoader)")` are the labels of the data loader.

# %%
lab.CAUSES  # cause -> the evidence to return with it

# %%
# Exercise 5.8: the cause of a slow run, and the evidence
def own_item_calls(trace):
    """The calls of .item() outside of the optimizer."""
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
# The check records each of the causes again, and a healthy run, with a model of another size.

# %%
lab.check_diagnose(diagnose)

# %%
lab.show_diagnoses(slow_runs, diagnose)

# %% [markdown]
# **Notice:** a slow rank shows on the *others*, as communication that takes long. The others are
# not slow: they wait. Search for the rank that waits least.

# %% [markdown]
# ## The same step on other links
#
# How long is a collective in flight on a given link? In a ring each rank receives all pieces but
# its own.

# %%
# Exercise 5.9: seconds of a ring all-gather, or reduce-scatter
def collective_seconds(nbytes, ranks, bandwidth):
    """nbytes: of the whole tensor. bandwidth: bytes per second in one direction."""
    ### BEGIN SOLUTION
    return (ranks - 1) / ranks * nbytes / bandwidth
    ### END SOLUTION


lab.check_collective_seconds(collective_seconds)

# %% [markdown]
# The chart takes the seconds that this machine computed, unit by unit, and replays the step with
# your `collective_seconds` in place of gloo. It is a *model, not a measurement*: one link per
# rank, no latency, nothing else on the link. On the right, computing is as fast as on an A100 at
# 40 % of its peak, with more tokens per rank.

# %%
lab.show_links(healthy, collective_seconds)

# %% [markdown]
# **Notice:** the exposed share depends on the ratio of computing to bytes, not on the link alone.
# This machine computes so slowly that every link is fast enough. On a GPU NVLink almost is; the
# collectives of the slow link cannot be hidden in any order; prefetch gains most in between.

# %% [markdown]
# ## I can …
#
# - [ ] compute the exposed share of a step from spans
# - [ ] explain why the moment of the call, not of the transfer, shows whose all-gather it is
# - [ ] write the assertion that fails when prefetch is off
# - [ ] say which rank is slow when all ranks take equally long

# %% [markdown]
# ## How it usually goes wrong
#
# - **Adding up durations**: collectives overlap one another, and the sum exceeds the step.
# - **Optimising hidden communication**: it costs nothing, so nothing is gained.
# - **Blaming the rank with the longest all-gather**: it waited for the slow one.
# - **An empty list to turn prefetch off**: it turns the default on.
# - **Measuring while recording**: the profiler slows a step down, most of all with stacks.

# %% [markdown]
# ## What to read
#
# - Y. Zhao et al., [PyTorch FSDP](https://arxiv.org/abs/2304.11277), VLDB 2023, sections 3.3 and
#   5.2. *Why does one stream for all collectives make backward prefetch necessary?*
# - [fully_shard](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html),
#   `set_modules_to_backward_prefetch`. *When would a unit fetch two others?*
# - [torch.profiler](https://docs.pytorch.org/docs/stable/profiler.html), `schedule`.
#   *How do you record step 1000 of a long run?*

# %% [markdown]
# ## What comes next
#
# Notebook **06 Scaling**: the same step on more and more ranks. How long does it stay efficient?
