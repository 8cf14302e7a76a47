"""The invariant of asynchronous collectives: each is waited for. On a CPU a result that nobody has
waited for is often there in time, and always if a rank sleeps; on a GPU it is not."""

from collections.abc import Sequence

import torch.distributed as dist

from labs.checks.verdicts import Wrong
from labs.meters.traffic import CollectiveCall, Traffic


class WaitTraffic(Traffic):
    """A Traffic that marks waits, as `mark_waits` does. never_waited: once it has ended, the
    collectives that this rank has neither waited for nor polled until they were done."""

    def __init__(self):
        super().__init__()
        self.never_waited: list[CollectiveCall] = []

    def __enter__(self):
        self._marks = self.marked_waits()
        super().__enter__()
        self._marks.__enter__()
        return self

    def __exit__(self, *exception):
        self.never_waited = self.never_waited_for()  # before its marks end, which forget it
        self._marks.__exit__(*exception)
        return super().__exit__(*exception)


def require_waits(never_waited: Sequence[CollectiveCall]) -> None:
    """Raises Wrong where there is one. never_waited: as of `WaitTraffic`."""
    # Right numbers prove nothing: who sleeps, or waits one step later, finds them where no rank is
    # late enough.
    if never_waited:
        raise Wrong(f"rank {dist.get_rank()}: {never_waited[0].kind} was issued and never "
                    "waited for, so its result may not be there yet",
                    "Nothing but handle.wait() says that a collective has ended, however long "
                    "ago it was issued.", code="never_waited")
