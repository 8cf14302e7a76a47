"""What the checks of exercises 6.6 and 6.7 share: which collectives stay inside a host."""

from collections import Counter

from labs.checks.verdicts import Wrong
from labs.meters.traffic import CollectiveCall
from labs.predictions.communication.traffic import passes

_KNOWN = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce",
          "gather", "scatter", "barrier")


class HostTraffic:
    """A rank's collectives by where they go. Ranks are numbered host by host, `ranks` on each.
    within: those whose group is on one host; crossing: all others."""

    def __init__(self, calls: list[CollectiveCall], ranks: int):
        self.ranks = ranks
        # A group of one rank sends nothing, and a barrier has no data.
        self.calls = [call for call in calls if call.ranks > 1 and call.kind != "barrier"]
        self.crossing = [call for call in self.calls if len(self._hosts(call)) != 1]
        self.within = [call for call in self.calls if len(self._hosts(call)) == 1]

    def _hosts(self, call) -> Counter[int]:
        """Host -> ranks of the call's group on it."""
        return Counter(member // self.ranks for member in call.members)

    def is_crowded(self, call: CollectiveCall) -> bool:
        """Whether the call's group has several ranks of one host."""
        return max(self._hosts(call).values()) > 1

    def sent(self, calls: list[CollectiveCall]) -> float:
        """Bytes that this rank sends in these calls, by ring algorithms; on the mean over the
        group, where a collective has a root."""
        return sum(passes(call.kind) * (call.ranks - 1) / call.ranks * call.bytes for call in calls)


def require_collectives(traffic: HostTraffic, where: str) -> None:
    """Raises Wrong for messages between two ranks, and for groups that torch does not know."""
    for call in traffic.calls:
        if call.kind not in _KNOWN or not call.members:
            raise Wrong(f"{where}: {call.kind} is none of the collectives of a process group",
                        "dist.reduce_scatter_single, dist.all_reduce and "
                        "dist.all_gather_single, each with group=mesh[...].get_group().",
                        code="wrong_collective")
