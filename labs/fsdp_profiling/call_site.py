"""Exercise 5.4: the function that called a collective."""

from collections.abc import Callable
from dataclasses import replace

from labs.checks.verdicts import Wrong, check, shows
from labs.fsdp_profiling import recorded_runs, synthetic_traces
from labs.fsdp_profiling.injected_faults import watch_activations
from labs.fsdp_profiling.recorded_runs import RecordedRun
from labs.fsdp_profiling.scaffold import LIBRARIES, non_fsdp_collectives
from labs.fsdp_profiling.shared_recording import recorded
from labs.meters.trace import Collective, Trace, subtract, total_seconds, union
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
def check_call_site(call_site):
    """call_site(collective): the innermost frame of its stack that is no library's."""
    [collective] = synthetic_traces.trace([("all_reduce", 1, 2)], []).collectives
    for number, (stack, want) in enumerate(_STACKS):
        _compare(call_site(replace(collective, stack=stack)), stack, want,
                 f"synthetic stack {number}")
    for trace in recorded(stacks=True, before_sharding=watch_activations):
        for collective in trace.of("all_reduce"):
            want = [frame for frame in collective.stack if "injected_faults.py" in frame][-1]
            _compare(call_site(collective), collective.stack, want,
                     f"rank {trace.rank}, an all-reduce recorded just now")
    return "the frame is found on synthetic stacks and on every rank of a run recorded just now"


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
        raise Wrong(f"{what}: {got!r} is an outer caller; {want!r} is nearer to the call",
                    "The stack has its outermost frame first: search from its end.",
                    code="outer_caller")
    raise Wrong(f"{what}: {got!r} is not the place; it is {want!r}", code="wrong_frame")


@shows("5.4")
def show_non_fsdp_collectives(run: RecordedRun, call_site: Callable) -> Table:
    """Returns a table of rank 0's collectives that serve no unit of FSDP, with their callers."""
    recorded_runs.require_usual({run.config.name: run})
    trace, rows, rate = run[0], [], bytes_per_second(run)
    for one in non_fsdp_collectives(trace):
        alone = link_bytes(one.kind, one.bytes, len(run)) / rate
        rows.append((one.kind, one.bytes, f"{1e3 * alone:.1g}", f"{1e3 * waited(trace, one):.2g}",
                     call_site(one).split("/labs/")[-1]))
    return Table("collectives of rank 0 that are not FSDP's",
                 ("kind", "bytes", "ms for its bytes", "ms that the rank waits",
                  "call site: file(line of its def): function"), rows)


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
