"""Exercise 5.4: the function that called a collective, and how long a rank waits for its calls."""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace

from labs.checks.generator import new_generator, unless_graded
from labs.checks.numbers import Cause, judge_number
from labs.checks.verdicts import Wrong, check, shows
from labs.fsdp_profiling import recorded_runs, synthetic_traces
from labs.fsdp_profiling.injected_faults import watch_activations
from labs.fsdp_profiling.recorded_runs import RecordedRun
from labs.fsdp_profiling.scaffold import LIBRARIES, non_fsdp_collectives
from labs.fsdp_profiling.shared_recording import recorded, shortened
from labs.meters.trace import Collective, Span, Trace, subtract, total_seconds, union
from labs.pictures.tables import Table
from labs.workers.slow_link import link_bytes

# A stack, outermost frame first, and the program's innermost frame in it. Frames of libraries stand
# behind it, and between the program's own.
_STACKS = [
    (("<string>(1): <module>", "train.py(10): step", "train.py(3): log_loss",
      "torch/distributed/distributed_c10d.py(3000): all_reduce",
      "<built-in method allreduce of ProcessGroup>"), "train.py(3): log_loss"),
    (("train.py(10): main", "my_metrics/norms.py(8): grad_norm", "torch/nn/utils/clip_grad.py(40): "
      "clip", "labs/workers/calls.py(64): call", "torch/distributed/c10d_logger.py(80): wrapper"),
     "my_metrics/norms.py(8): grad_norm"),
    (("train.py(10): main", "nn.Module: Model_0", "torch/nn/modules/module.py(1): _call_impl",
      "model.py(20): forward", "model.py(31): gather_stats", "nn.Module: Stats_0",
      "torch/nn/modules/module.py(1): _call_impl", "stats.py(5): forward",
      "torch/distributed/distributed_c10d.py(9): all_gather_single"), "stats.py(5): forward")]


@check("5.4", device=None)
def check_call_site(call_site, exposed_by_call_site):
    """call_site(collective): the innermost frame of its stack that is no library's;
    exposed_by_call_site(trace): call site -> exposed seconds of the collectives that are not
    FSDP's."""
    [collective] = synthetic_traces.trace([("all_reduce", 1, 2)], []).collectives
    rng = new_generator()
    for number, (stack, want) in enumerate([*_STACKS, _drawn_stack(rng), _drawn_stack(rng)]):
        _compare(call_site(replace(collective, stack=stack)), stack, want,
                 f"synthetic stack {number}")
    run = recorded(stacks=True, before_sharding=watch_activations)
    for trace in run:
        for collective in trace.of("all_reduce"):
            want = [frame for frame in collective.stack if "injected_faults.py" in frame][-1]
            _compare(call_site(collective), collective.stack, want,
                     f"rank {trace.rank}, an all-reduce recorded just now")
    for name, trace in {"synthetic": _trace_with_stacks(),
                        **{f"recorded, rank {trace.rank}": trace for trace in run},
                        "of drawn moments": _drawn_trace(rng)}.items():
        _judge_seconds(exposed_by_call_site(trace), trace, f"trace {name!r}")
    return ("the frames, and the exposed seconds of each, are right on synthetic stacks and on "
            "every rank of a run recorded just now")


def _trace_with_stacks() -> Trace:
    """Two call sites call three collectives of two kinds, one of them an all-gather; FSDP's own
    all-gather begins after its label, and one of the others begins inside of such a label."""
    labels = [Span(name, "label", begin, end) for name, begin, end in (
        ("FSDP::pre_forward (layer.0)", 0.4, 1.1), ("FSDP::all_gather (layer.0)", 0.5, 1.0),
        ("labs::forward", 0.0, 9.0), ("FSDP::pre_forward (layer.1)", 6.2, 6.6))]
    trace = synthetic_traces.trace(
        [("all_gather", 1.2, 3.2, 0.7), ("all_reduce", 3.5, 5.0, 3.4),
         ("all_reduce", 6.3, 7.0, 5.8), ("all_gather", 7.2, 9.0, 7.1)],
        [(0, 2.2), (4.0, 5.5), (6.75, 7.5)], labels=labels)
    stacks = [_STACKS[2][0], _STACKS[0][0], _STACKS[0][0], _STACKS[1][0]]
    return replace(trace, collectives=tuple(
        replace(one, stack=stack)
        for one, stack in zip(trace.collectives, stacks, strict=True)))


def _drawn_stack(rng: random.Random) -> tuple[tuple[str, ...], str]:
    """A stack of frames of drawn files and lines, and the program's innermost frame in it."""
    def frames(names, ending):
        return [f"{rng.choice(names)}{ending}({rng.randint(1, 900)}): {rng.choice(names)}"
                for _ in range(rng.randint(1, 3))]

    own = frames(("fit", "losses", "schedule", "evaluate", "logging_hooks"), ".py")
    library = frames(("torch/nn/modules/module", "torch/utils/checkpoint",
                      "torch/distributed/distributed_c10d", "labs/workers/calls"), ".py")
    at = rng.randint(0, len(own) - 1)
    return (*own[:at], *library[:1], *own[at:], *library), own[-1]


def _drawn_trace(rng: random.Random) -> Trace:
    """A trace of drawn moments whose collectives two call sites call, none of them FSDP's."""
    trace = synthetic_traces.drawn_for_shares(rng)
    stacks = [_drawn_stack(rng)[0] for _ in range(2)]
    return replace(trace, collectives=tuple(
        replace(one, stack=stacks[number % 2]) for number, one in enumerate(trace.collectives)))


def own_call_site(collective: Collective) -> str:
    """Returns the innermost frame that is no library's."""
    return next(frame for frame in reversed(collective.stack)
                if not any(word in frame for word in LIBRARIES))


def _judge_seconds(got, trace, what):
    if not isinstance(got, Mapping):
        raise Wrong(f"{what}: exposed_by_call_site returned {shortened(got)}, not a dictionary",
                    "{call site: seconds}", code="wrong_type")
    groups = {}
    for collective in non_fsdp_collectives(trace):
        groups.setdefault(own_call_site(collective), []).append(collective)
    # Invariant: the collectives whose call no label of FSDP encloses, whatever their kind. Catches
    # a filter by kind, and one by the moment at which the collective begins.
    if missing := [site for site in groups if site not in got]:
        raise Wrong(f"{what}: the call site {missing[0]!r} is missing",
                    "Take each of trace.collectives whose call, collective.issued, lies in no "
                    'label that begins with "FSDP::".', code="missing_entry")
    if extra := [site for site in got if site not in groups]:
        raise Wrong(f"{what}: {shortened(extra[0])} is no call site of such a collective",
                    "The keys are what call_site returns, for collectives whose call lies in no "
                    'label that begins with "FSDP::".', code="extra_entry")
    for site, calls in groups.items():
        # Invariant: the exposed seconds of all its calls together.
        exposed = [waited(trace, one) for one in calls]
        judge_number(got[site], sum(exposed), _second_causes(trace, calls, exposed),
                     f"{what}, {site!r}: the exposed time", "s")


def _second_causes(trace, calls, exposed) -> list[Cause]:
    in_flight = sum(one.seconds for one in calls)
    return [
        Cause("all_communication", in_flight, "that is all time in flight, hidden or not",
              "Take away the intervals in which the rank computes: lab.subtract."),
        Cause("part_hidden", in_flight - sum(exposed), "that is the part that is hidden",
              "Exposed is the other one."),
        Cause("counts_calls", len(calls), "that counts calls, not seconds",
              "Add up seconds: lab.total_seconds."),
        Cause("in_milliseconds", 1e3 * sum(exposed), "that is in milliseconds", "Return seconds."),
        Cause("in_share", sum(exposed) / trace.seconds, "that is a share of the step",
              "Return seconds."),
        Cause("counts_from_call", sum(total_seconds(subtract([(one.issued, one.end)],
                                                             trace.compute)) for one in calls),
              "that counts from the call, not from when the collective was in flight",
              "Take begin and end."),
        *([Cause("not_added_up", one, "that is of one call alone",
                 "A call site may call several times: add up its calls.")
           for one in (exposed[0], exposed[-1])] if len(calls) > 1 else [])]


def _compare(got, stack, want, what):
    # The innermost frame of somebody's own code: an outer one of it called the caller, and an inner
    # one belongs to a library, through which every collective goes.
    if got == want:
        return
    if got not in stack:
        raise Wrong(f"{what}: call_site returned {got!r}, which is not on the stack",
                    "Return one of the strings of collective.stack, as it is.", code="not_on_stack")
    if any(part in got for part in LIBRARIES):
        raise Wrong(f"{what}: {got!r} is a library's",
                    "lab.LIBRARIES has the words by which a library's frame is known.",
                    code="library_frame")
    if stack.index(got) < stack.index(want):
        raise Wrong(f"{what}: {got!r} is an outer caller; {unless_graded(repr(want))} is nearer to "
                    "the call",
                    "The stack has its outermost frame first: search from its end.",
                    code="outer_caller")
    raise Wrong(f"{what}: {got!r} is not the place; it is {unless_graded(repr(want))}",
                code="wrong_frame")


@shows("5.4")
def show_non_fsdp_collectives(run: RecordedRun, call_site: Callable,
                              exposed_by_call_site: Callable) -> Table:
    """Returns a table of rank 0's collectives that serve no unit of FSDP, with their callers, and
    below it the exposed time of each caller."""
    recorded_runs.require_usual({run.config.name: run})
    trace, rows, rate = run[0], [], bytes_per_second(run)
    for one in non_fsdp_collectives(trace):
        alone = link_bytes(one.kind, one.bytes, len(run)) / rate
        rows.append((one.kind, one.bytes, f"{1e3 * alone:.1g}", f"{1e3 * waited(trace, one):.2g}",
                     _short(call_site(one))))
    note = "; ".join(f"{_short(site)}: {1e3 * seconds:.2g} ms exposed"
                     for site, seconds in exposed_by_call_site(trace).items())
    return Table("collectives of rank 0 that are not FSDP's",
                 ("kind", "bytes", "ms for its bytes", "ms that the rank waits",
                  "call site: file(line of its def): function"), rows, note=note)


def _short(site) -> str:
    return str(site).split("/labs/")[-1]


def bytes_per_second(run: RecordedRun) -> float:
    """Returns what the slow link carries; on GPUs, where the real link is used, the most that it
    carried during one of the run's all-gathers or reduce-scatters."""
    if run.link:
        return run.link.bytes_per_second
    return max(link_bytes(one.kind, one.bytes, len(run)) / one.seconds for trace in run
               for one in trace.of("all_gather", "reduce_scatter") if one.seconds)


def waited(trace: Trace, collective: Collective) -> float:
    """Returns the seconds of a collective in which the rank does not compute."""
    return total_seconds(subtract(union([collective]), trace.compute))
