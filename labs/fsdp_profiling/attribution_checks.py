"""Checks of exercises 5.3 and 5.4: whose all-gather it is, and which line called a collective."""

from labs.exercises.verdicts import Wrong, check
from labs.fsdp_profiling import leftovers, made
from labs.fsdp_profiling.share_checks import recorded
from labs.meters import trace_units as units

LIBRARIES = ("torch/", "transformers/", "multiprocessing/", "threading.py", "nn.Module: ",
             "<built-in", "<string>", "labs/workers/")
"""What a frame that belongs to a library has in it; what is left is somebody's own code."""


@check("5.3", hints={"list index out of range":
                     "No label was found there: a call lies inside of its label, collective.issued "
                     "tells when; the collective may be under way long after the label's end."})
def check_attribute(attribute):
    """attribute(trace, collective): (unit, phase) of an all-gather, by the labels around it."""
    made_ones = {"made": made.fetching(), "made, without prefetch": made.fetching(ahead=False),
                 "made, slow wire": made.fetching(flight=4.0)}
    run = {f"recorded, rank {trace.rank}": trace for trace in recorded()}
    for name, trace in {**made_ones, **run}.items():
        for number, gather in enumerate(trace.of("all_gather")):
            _compare_owner(attribute(trace, gather), trace, gather,
                           f"trace {name!r}, all-gather {number}")
    return ("every all-gather has its unit and its phase, prefetched or not, on made traces and on "
            "every rank of a run recorded just now")


def _compare_owner(got, trace, gather, what):
    owner = units.owner(trace, gather)
    want = (owner.unit, owner.phase)
    if not isinstance(got, tuple | list) or len(got) != 2:
        raise Wrong(f"{what}: attribute returned {got!r}, not (unit, phase)",
                    'For example ("root", "forward").')
    if tuple(got) == want:
        return
    unit, phase = got
    if phase != owner.phase:
        begun = trace.enclosing(gather.begin, f"labs::{phase}")
        raise Wrong(f"{what}: issued in {owner.phase}, not in {phase or 'no phase'}",
                    "Look around the moment of the call, collective.issued, not around its begin."
                    if begun else "The label around the call is labs::forward or labs::backward.")
    asking = [units.unit_of(label.name) for label in trace.enclosing(gather.issued, "FSDP::pre_")]
    if owner.prefetched and unit in asking:
        raise Wrong(f"{what}: it is for {owner.unit}; {unit} is the unit that fetched it ahead",
                    "The innermost label, FSDP::all_gather (unit), says whose parameters travel.")
    if owner.unit == units.ROOT:
        raise Wrong(f"{what}: it is for the root, and attribute says {unit!r}",
                    'A label FSDP::all_gather without a unit is the root\'s: return "root".')
    around_it = trace.enclosing(gather.begin, "FSDP::all_gather")
    raise Wrong(f"{what}: it is for {owner.unit}, not for {unit!r}",
                "When it is under way, no label lies around it any more: look around the moment of "
                "the call, collective.issued." if unit == units.ROOT and not around_it else
                "The unit's name stands in brackets, as the module is called in the model.")


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


@check("5.4")
def check_call_site(call_site):
    """call_site(collective): the innermost frame of its stack that is no library's."""
    for number, (stack, want) in enumerate(_STACKS):
        [gather] = made.trace([("all_reduce", 1, 2)], []).collectives
        _compare_site(call_site(type(gather)(**{**vars(gather), "stack": stack})), stack, want,
                      f"made stack {number}")
    for trace in recorded(stacks=True, tap=leftovers.watch_activations):
        for stranger in trace.of("all_reduce"):
            want = [frame for frame in stranger.stack if "leftovers.py" in frame][-1]
            _compare_site(call_site(stranger), stranger.stack, want,
                          f"rank {trace.rank}, an all-reduce recorded just now")
    return "the line is found on made stacks and on every rank of a run recorded just now"


def _compare_site(got, stack, want, what):
    if got == want:
        return
    if got not in stack:
        raise Wrong(f"{what}: call_site returned {got!r}, which is not on the stack",
                    "Return one of the strings of collective.stack, as it is.")
    if any(part in got for part in LIBRARIES):
        raise Wrong(f"{what}: {got!r} is a library's",
                    "lab.LIBRARIES has the words by which a library's frame is known.")
    if stack.index(got) < stack.index(want):
        raise Wrong(f"{what}: {got!r} is an outer caller; {want!r} is nearer to the call",
                    "The stack has its outermost frame first: search from its end.")
    raise Wrong(f"{what}: {got!r} is not the place; it is {want!r}")


def strangers(traces) -> list:
    """The collectives of rank 0 that are not FSDP's."""
    return [one for one in traces[0].collectives if not units.owner(traces[0], one).unit]

