"""Exercise 6.8: the fastest of DDP, HSDP and FSDP whose model states fit."""

from collections.abc import Callable
from dataclasses import dataclass

from labs.checks.generator import new_generator, unless_graded
from labs.checks.numbers import require_signature
from labs.checks.verdicts import Wrong, check, kind_of, shows
from labs.pictures.tables import Table
from labs.predictions import hardware
from labs.predictions.communication import strategy_choice
from labs.predictions.communication.host_links import Topology
from labs.predictions.communication.strategy_choice import STRATEGIES, Links
from labs.words import counted

NAMES = ("parameters", "memory", "hosts", "ranks", "inside", "across")
CLEAR = 1.05  # of two times: a case in which a rounding could decide is no case
NUMBER = 320  # of cases


@dataclass(frozen=True)
class Case:
    """parameters: how many. memory: bytes for model states on a GPU. inside, across: bytes/s, of
    a GPU and of all network cards of a host."""

    parameters: float
    memory: float
    hosts: int
    ranks: int
    inside: float
    across: float

    @property
    def topology(self) -> Topology:
        return Topology(self.hosts, self.ranks)

    def held(self, strategy: str) -> float:
        """Bytes of states on a GPU."""
        return strategy_choice.held_bytes(strategy, self.parameters, self.topology)

    def seconds(self, strategy: str) -> float:
        """Of a step's collectives."""
        return strategy_choice.step_seconds(strategy, self.parameters, self.topology,
                                            Links(self.inside, self.across))

    @property
    def answer(self) -> str | None:
        return strategy_choice.fastest_that_fits(self.parameters, self.memory, self.topology,
                                                 Links(self.inside, self.across))

    @property
    def is_clear(self) -> bool:
        """Whether a small change of a number leaves the answer as it is."""
        # Near a tie the answer depends on rounding, and a right answer could fail.
        times = sorted(self.seconds(each) for each in STRATEGIES if self.held(each) <= self.memory)
        apart = len(times) < 2 or times[0] * CLEAR < times[1]
        return apart and all(abs(self.held(each) / self.memory - 1) > 0.02 for each in STRATEGIES)

    def __str__(self):
        return (f"{self.parameters / 1e9:.3g}B parameters, {self.memory / 1e9:.3g} GB for states "
                f"on a GPU, {counted(self.hosts, 'host')} × {counted(self.ranks, 'GPU')}, "
                f"{self.inside / 1e9:.3g} GB/s inside, {self.across / 1e9:.3g} GB/s across")


def cases() -> list[Case]:
    """Cases in which the answer is clear: real ones first, then drawn, others at each call."""
    # Nodes with NVLink and a card of 400 Gbit/s for each GPU; then one such card a host; PCIe and
    # 10 Gbit/s; a host without any fast link inside; one host.
    found = [Case(1.3e9, 60e9, 2, 8, 450e9, 400e9), Case(7e9, 60e9, 2, 8, 450e9, 400e9),
             Case(7e9, 60e9, 16, 8, 450e9, 400e9), Case(70e9, 60e9, 16, 8, 450e9, 400e9),
             Case(1.3e9, 60e9, 2, 8, 300e9, 50e9), Case(7e9, 60e9, 4, 8, 300e9, 50e9),
             Case(70e9, 60e9, 4, 8, 300e9, 50e9), Case(70e9, 60e9, 2, 8, 300e9, 50e9),
             Case(1.3e9, 60e9, 64, 8, 60e9, 50e9), Case(0.1e9, 20e9, 2, 4, 12e9, 1.25e9),
             Case(1.3e9, 16e9, 1, 8, 300e9, 50e9), Case(1.3e9, 60e9, 1, 8, 300e9, 50e9),
             Case(3e9, 40e9, 4, 2, 6e9, 50e9), Case(1.3e9, 60e9, 8, 1, 300e9, 12e9)]
    found = [case for case in found if case.is_clear]
    rng = new_generator()
    while len(found) < NUMBER:
        case = Case(10**rng.uniform(8, 11), rng.choice((16e9, 40e9, 60e9, 120e9)),
                    rng.choice((1, 2, 2, 3, 4, 16, 64)), rng.choice((1, 2, 4, 8)),
                    10**rng.uniform(9.5, 11.7), 10**rng.uniform(8, 11.7))
        # one GPU alone has no link, and nothing to choose
        if case.topology.world_size > 1 and case.is_clear:
            found.append(case)
    return found


@check("6.8")
def check_choose_strategy(choose_strategy: Callable):
    """choose_strategy(parameters, memory, hosts, ranks, inside, across): "DDP", "HSDP" or "FSDP",
    the fastest whose states fit; None where none does."""
    require_signature(choose_strategy, NAMES)
    tried = cases()
    for case in tried:
        got = choose_strategy(*(getattr(case, name) for name in NAMES))
        if got is not None and got not in STRATEGIES:
            shown = repr(got) if isinstance(got, str) else kind_of(got)
            raise Wrong(f"choose_strategy returned {shown}, none of {', '.join(STRATEGIES)}",
                        'A string: "DDP", "HSDP" or "FSDP"; None if none fits.',
                        code="unknown_name")
        _judge(case, got)
    return (f"right in all {len(tried)} cases, by the models of memory (16 bytes of states for "
            "each parameter) and of the links")


def _judge(case, got):
    want = case.answer
    if got == want:
        return
    if got is None:
        raise Wrong(f"{case}: you say that nothing fits, but {unless_graded(want)} "
                    f"stores {unless_graded(f'{case.held(want) / 1e9:.3g}')} GB a GPU",
                    "HSDP divides the states by a host's GPUs, FSDP by all of them.",
                    code="nothing_returned")
    # What does not fit cannot be chosen, however fast it would be.
    if case.held(got) > case.memory:
        raise Wrong(f"{case}: {got} does not fit, it stores {case.held(got) / 1e9:.3g} GB a GPU",
                    "16 bytes for each parameter: 2 + 2 + 12, replicated under DDP, divided by a "
                    "host's GPUs under HSDP, and by all GPUs under FSDP.", code="does_not_fit")
    times = {each: case.seconds(each) for each in (got, want)}
    hint = ("One host sends nothing across: its slowest link is the one inside, and HSDP is FSDP."
            if case.hosts == 1 else "Which strategy is fastest depends on both links: compute the "
            "seconds of each that fits. A ring is as slow as its slowest edge.")
    raise Wrong(f"{case}: {got} fits, but {unless_graded(want)} fits too and is faster: "
                f"{unless_graded(_ms(times[want]))} of collectives in a step, {got} "
                f"{_ms(times[got])}", hint, code="slower_choice")


def _ms(seconds) -> str:
    """Three digits, or all before the point."""
    return f"{1e3 * seconds:,.0f} ms" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


@shows("6.8")
def show_choice(choose_strategy: Callable, memory: float = 60e9, ranks: int = 8) -> Table:
    """Returns a table of what the student's rule chooses for three models on two kinds of clusters,
    with the modelled milliseconds of each strategy's collectives."""
    rows = []
    for parameters in (1.3e9, 7e9, 70e9):
        for hosts in (2, 16):
            for name, links in _CLUSTERS.items():
                topology = Topology(hosts, ranks)
                times = [_modelled(each, parameters, memory, topology, links)
                         for each in STRATEGIES]
                chosen = _strategy(choose_strategy(parameters, memory, hosts, ranks, links.inside,
                                                   links.across))
                rows.append((f"{parameters / 1e9:g}B", f"{hosts} × {ranks}", name, *times, chosen))
    return Table(f"{memory / 1e9:g} GB for states on a GPU: ms of collectives in a step",
                 ("model", "GPUs", "links inside, between hosts", *STRATEGIES, "your choice"), rows,
                 left=2, note="– : the model states do not fit. NVLink: an H100's "
                              f"{_H100.nvlink / 1e9:g} GB/s in one direction, by NVIDIA's data "
                              "sheet; PCIe: 25 GB/s.")


def _strategy(choice) -> str | None:
    """The student's choice, which is one of STRATEGIES or None."""
    if choice is not None and choice not in STRATEGIES:
        shown = repr(choice) if isinstance(choice, str) else kind_of(choice)
        raise Wrong(f"choose_strategy returned {shown}, none of {', '.join(STRATEGIES)}",
                    "Where none fits, return None.", code="unknown_name")
    return choice


_H100 = hardware.gpu("H100")
_CLUSTERS = {"NVLink, a card of 400 Gbit/s for each GPU": Links(_H100.nvlink, 8 * 50e9),
             "PCIe, one card of 10 Gbit/s a host": Links(25e9, 1.25e9)}


def _modelled(strategy, parameters, memory, topology, links) -> str:
    if strategy_choice.held_bytes(strategy, parameters, topology) > memory:
        return "–"
    return f"{1e3 * strategy_choice.step_seconds(strategy, parameters, topology, links):,.0f}"
