"""`launch`: run a function on real ranks, from a notebook cell or a script."""

import contextlib
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

from labs.words import counted
from labs.workers import devices, memory, source_lines
from labs.workers.failures import Interrupted, LaunchError, remember
from labs.workers.pickling import pack
from labs.workers.progress import status
from labs.workers.rank_group import RankGroup
from labs.workers.slow_link import Link

_announced = set()  # reasons of plans that were already shown
_time_limit: ContextVar[float | None] = ContextVar("time_limit", default=None)


@dataclass(frozen=True)
class Options:
    """What can be set for one launch.

    device: "cpu" or "cuda" instead of what the machine offers.
    hang_after: seconds that every rank waits for others, or has returned, and nothing moves, before
        the ranks are stopped. A rank that computes, sleeps or reads is waited for without limit.
    verify: name a collective that does not match the other ranks' at once.
    timeout: seconds that `fn` may take, even if it computes (None: no limit); those in which ranks
        waited for a core do not count.
    memory_limit: bytes that each rank may take beyond what it starts with; more is OutOfMemory.
    link: on the CPU, the link that each rank's collectives pass (`labs.workers.slow_link`).
    quiet: show nothing of what the ranks print or report; it is still in the results.
    environment: variables to set on the ranks, in addition to those of this process.
    """

    device: str | None = None
    hang_after: float = 10.0
    verify: bool = True
    timeout: float | None = None
    memory_limit: float | None = None
    link: Link | None = None
    quiet: bool = False
    environment: dict[str, str] = field(default_factory=dict)


class Results(list):
    """results[r] is what the function returned on rank r.

    series: name -> values that rank 0 reported. output[r]: what rank r printed, its first 16 MB.
    seconds: from the call of `launch` to the last result.
    """

    def __init__(self, values, series: dict[str, list[float]], output: list[str], seconds: float):
        super().__init__(values)
        self.series, self.output, self.seconds = series, output, seconds


def launch(fn: Callable, *args, ranks: int | None = None, **options) -> Results:
    """Runs `fn(*args)` on `ranks` ranks at once, each a fresh process; entry r of the result is
    what rank r returned.

    Inside `fn` the process group is up, `torch.distributed` works as usual and the rank's device
    is set. `fn` may be defined in a cell; what it closes over is sent with it. ranks=None takes
    what the machine offers; the options are those of `Options`.

    Raises RankFailed when a rank raises, exits or is killed (OutOfMemory when it wanted too much);
    RanksStuck when ranks wait for one another; CannotSend when something cannot be sent. No process
    is left behind, whatever happens.
    """
    if "LABS_RANK" in os.environ:
        raise LaunchError("launch was called on a rank: call it from the notebook, "
                          "not inside a function that already runs on ranks")
    began = time.monotonic()
    chosen = _options(options)
    plan = devices.plan(ranks, chosen.device)
    memory_limit = memory.validated(chosen.memory_limit, plan.devices[0])
    _announce(plan, chosen.quiet)
    group = RankGroup(plan, pack(fn, args), replace(chosen, memory_limit=memory_limit))
    try:
        # What ranks print goes to the terminal, too, and would run into the line.
        with status(f"{counted(plan.ranks, 'rank')} at work", terminal=chosen.quiet,
                    details=group.running_line):
            values = group.run()
    except Interrupted:
        raise
    except KeyboardInterrupt:  # it came while the ranks were being stopped
        raise Interrupted([]) from None
    except LaunchError as error:
        # Only here: the output is complete when the ranks have been stopped.
        error.output = group.output.text
        raise remember(error) from error.__cause__
    return Results(values, group.progress.series, group.output.text, time.monotonic() - began)


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Inside the block, each launch that is given no timeout has this one: a check must end, also
    with an endless loop in the answer."""
    before = _time_limit.set(seconds)
    try:
        yield
    finally:
        _time_limit.reset(before)


def _options(given) -> Options:
    known = Options.__dataclass_fields__
    if unknown := set(given) - set(known):
        raise TypeError(f"launch has no option {', '.join(sorted(unknown))}; it has ranks, "
                        f"{', '.join(known)}. Arguments of the function go by position")
    return Options(**{"timeout": _time_limit.get(), **given})


def has_been_told(reason: str) -> None:
    """Notes that the student has read why ranks run where they do: no launch prints it again."""
    _announced.add(reason)


def _announce(plan, quiet):
    """Says once what was chosen and why, and warns of more ranks than sensible."""
    if warning := devices.oversubscription(plan.ranks):
        warnings.warn(warning, stacklevel=source_lines.steps_to_caller())
    if plan.reason not in _announced and not quiet:
        _announced.add(plan.reason)
        print(plan.reason, file=sys.stdout, flush=True)
