"""Exercise 6.5: bytes of a ring all-reduce on a host's link, and its seconds; and the pictures of
what the kernel counted and the clock measured, beside the formulas."""

from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import partial
from math import isclose

from matplotlib.lines import Line2D

from labs.checks.generator import new_generator
from labs.checks.guesses import guessed
from labs.checks.numbers import (
    Mistake,
    as_number,
    judge_number,
    likeliest_cause,
    require_numbers,
    require_positive,
    require_several,
    require_signature,
)
from labs.checks.scripts.files import raise_if_waiting
from labs.checks.verdicts import Wrong, check, shows
from labs.meters.metrics import Metric
from labs.pictures import marks, palette
from labs.pictures.bars import Bar, bars
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.predictions.communication import traffic
from labs.predictions.communication.host_links import LinkTime, Topology, flat_all_reduce
from labs.scaling.link_collectives import FITTED, TRIED
from labs.scaling.link_measurements import (
    fit_all_reduces,
    last_all_reduces,
    measure_all_reduces,
)
from labs.scaling.link_recordings import LinkRun
from labs.words import counted
from labs.workers.hosts.links import read_bandwidth

ONE_BYTE = 0.999999  # less than one, which is what int() cuts off
NAMES = ("size", "hosts", "ranks", "alpha", "beta")


@dataclass(frozen=True)
class Case:
    """A tensor of `size` bytes on hosts with so many ranks each; α in seconds, β in bytes/s."""

    size: int
    hosts: int
    ranks: int
    alpha: float
    beta: float

    @property
    def world(self) -> int:
        return self.hosts * self.ranks

    @property
    def bytes(self) -> float:
        return flat_all_reduce(self.size, Topology(self.hosts, self.ranks))

    @property
    def seconds(self) -> float:
        return LinkTime(self.alpha, self.beta).seconds(self.bytes)

    def __str__(self):
        return (f"link_seconds({self.size}, hosts={self.hosts}, ranks={self.ranks}, "
                f"alpha={self.alpha:g}, beta={self.beta:g})")


# Odd sizes, and more hosts than ranks and fewer: what counts hosts, ranks of a host or all ranks
# differs in each. On one host nothing crosses a link.
CASES = (Case(8_000_000, 2, 2, 0.004, 25e6), Case(1_000_003, 2, 8, 0.002, 12.5e9),
         Case(64, 3, 2, 0.01, 6.25e6), Case(123_457, 8, 4, 0.0005, 1e9),
         Case(2**30, 16, 8, 0.0002, 50e9), Case(4_000_000, 5, 1, 0.003, 3.1e6),
         Case(4_000_000, 1, 4, 0.001, 25e6), Case(7, 2, 3, 0.25, 1.5))
_BYTES: tuple[Mistake, ...] = (
    Mistake("ring_one_rank_on_host", lambda case: 2 * (case.hosts - 1) / case.hosts * case.size,
            "that is a ring with one rank on each host", "N is the number of all ranks."),
    Mistake("ring_inside_one_host", lambda case: 2 * (case.ranks - 1) / case.ranks * case.size,
            "that is a ring inside one host", "N is the number of all ranks."),
    Mistake("reduce_scatter_alone", lambda case: case.bytes / 2, "that is a reduce-scatter alone",
            "An all-reduce is a reduce-scatter and an all-gather."),
    Mistake("counts_both_directions_together", lambda case: 2 * case.bytes,
            "that counts both directions together",
            "The link carries as many bytes in each direction at the same time."),
    Mistake("all_ranks_host_send_together", lambda case: case.ranks * case.bytes,
            "that is what all ranks of a host send together", "In a ring each rank sends to the "
            "next one only, and all but one of a host's ranks have that one on their own host."),
    Mistake("all_ranks_send_together", lambda case: case.world * case.bytes,
            "that is what all ranks send together",
            "Only one rank of a host sends over its link."),
    Mistake("own_piece_too", lambda case: 2 * case.size, "that is 2S",
            "No rank sends its own piece to itself: (N-1)/N."),
    Mistake("tensor_itself", lambda case: case.size, "that is the tensor itself",
            "How often does each piece pass?"),
    Mistake("on_one_host_no_byte", lambda case: 2 * (case.world - 1) / case.world * case.size,
            "one host alone sends nothing over its link",
            "The ranks of a host reach each other without it."),
    Mistake("in_bits", lambda case: 8 * case.bytes, "that is in bits",
            "Size and result are in bytes."))
_SECONDS: tuple[Mistake, ...] = (
    Mistake("missing", lambda case: case.bytes / case.beta, "α is missing", "α + bytes/β."),
    Mistake("size_not_bytes", lambda case: case.alpha + case.size / case.beta, "that is α + S/β",
            "Not S bytes cross the link, but the bytes that you have just computed."),
    Mistake("takes_for_bits_per_second", lambda case: case.alpha + 8 * case.bytes / case.beta,
            "that takes β for bits per second", "β is in bytes per second."),
    Mistake("wrong_steps",
            lambda case: 2 * (case.world - 1) * case.alpha + case.bytes / case.beta,
            "that counts α once for each step of the ring",
            "This α is fitted to whole all-reduces."),
    Mistake("sends_both_directions_one_after", lambda case: case.alpha + 2 * case.bytes / case.beta,
            "that sends both directions one after the other", "They pass at the same time."),
    Mistake("multiplies", lambda case: case.alpha + case.bytes * case.beta, "that multiplies by β",
            "β is bytes per second."),
    Mistake("multiplies_rest", lambda case: case.alpha * case.bytes / case.beta,
            "that multiplies α by the rest", "α + bytes/β."))


@check("6.5")
def check_link_seconds(link_seconds):
    """link_seconds(size, hosts, ranks, alpha, beta) -> (bytes on a host's link in each direction,
    seconds) of a ring all-reduce."""
    require_signature(link_seconds, NAMES)
    rng = new_generator()
    cases = (*CASES, Case(rng.randrange(10**5, 10**8), rng.randint(2, 16), rng.randint(2, 8),
                          rng.uniform(1e-4, 1e-2), rng.uniform(1e7, 5e10)))
    answers = [require_several(link_seconds(*astuple(case)), ("bytes", "seconds"), f"{case}: it "
                               "returned", "numbers") for case in cases]
    _judge_order(answers)
    for which, mistakes in enumerate((_BYTES, _SECONDS)):
        # Mistakes are named by what explains the answers of all cases: one case fits several by
        # chance.
        given = [as_number(pair[which]) for pair in answers]
        for at, case in enumerate(cases):
            # Of a ring over all ranks one edge leaves each host, and it carries what one rank
            # sends: 2(N-1)/N · S. On one host none does.
            want = (case.bytes, case.seconds)[which]
            causes = likeliest_cause(mistakes, cases, given, at)
            # Bytes may be cut off to a whole number, and seconds computed from that.
            judge_number(answers[at][which], want, causes,
                         f"{case}: the {('bytes', 'seconds')[which]}",
                         abs_tol=(ONE_BYTE, ONE_BYTE / case.beta)[which])
    return (f"bytes and seconds are right for {len(CASES)} cases, from one host to 16, and from "
            "7 bytes to a GiB")


def _judge_order(answers):
    """What the two numbers are shows only in their order."""
    case, pair = CASES[0], answers[0]
    if all(number is not None and isclose(number, want) for number, want in
           zip(map(as_number, pair), (case.seconds, case.bytes), strict=True)):
        raise Wrong(f"{case}: the two numbers are exchanged", "Return bytes, then seconds.",
                    code="swapped")


_FORMULAS = {"all-reduce": traffic.all_reduce, "all-gather": traffic.all_gather,
             "reduce-scatter": traffic.reduce_scatter}


@shows("6.5")
def show_fit(link_seconds: Callable, run: LinkRun | None = None) -> Picture:
    """Fits α and β, and draws the measured seconds of all-reduces by size, those that were fitted
    and those that were not, and the lines that the student's function predicts, one for each
    bandwidth. run: None means what `show_link_bytes` measured.

    β is proportional to the bandwidth; α stays as it is.
    """
    raise_if_waiting(link_seconds, len(NAMES))
    run = run or last_all_reduces()
    fitted = fit_all_reduces(run)
    figure, ax = canvas(WIDTH, 3.7 + marks.HEADLINE + marks.NOTE_LINE * len(run.note.splitlines()))
    metrics = []
    for number, bandwidth in enumerate(dict.fromkeys(name for name, _ in (*FITTED, *TRIED))):
        time, colour = _at(fitted, bandwidth), palette.RANKS[number]
        points = [point for point in (*FITTED, *TRIED) if point[0] == bandwidth]
        largest = max(size for _, size in points)
        _draw_line(ax, bandwidth, largest, colour, run.seconds("all-reduce", bandwidth, largest),
                   partial(_seconds, link_seconds, run.topology, time))
        for point in points:
            predicted = _seconds(link_seconds, run.topology, time, point[1])
            metrics.append(_draw_point(ax, point, run, predicted, colour))
    ax.set(xlabel="MB of the tensor", ylabel="seconds of an all-reduce")
    ax.set_xlim(0, 4.9)
    ax.set_ylim(0)
    ax.grid(axis="y", color=palette.GRID)
    ax.set_axisbelow(True)
    worst = max(abs(one.value / one.predicted - 1) for one in metrics
                if not one.name.endswith("(fitted)"))
    lesson = f"Fitted on {len(FITTED)} points, α and β predict {len(TRIED)} others to {worst:.1%}"
    marks.headline(figure, lesson)
    marks.legend_above(figure, _legend_of_fit())
    marks.note_below(figure, run.note)
    words = [f"{one.name}: measured {one.value:.3f} s, predicted {one.predicted:.3f}"
             for one in metrics]
    return Picture(figure, "\n".join([lesson, str(fitted), *words, *filter(None, [run.note])]),
                   data=run, metrics=metrics)


def _draw_line(ax, bandwidth, largest, colour, measured, seconds):
    """The predicted seconds up to the largest size, with the bandwidth at its end, above what was
    measured there."""
    sizes = [largest * step / 20 for step in range(1, 21)]
    ax.plot([size / 1e6 for size in sizes], list(map(seconds, sizes)), color=colour, linewidth=1.4)
    ax.annotate(link_name(bandwidth), (largest / 1e6, max(measured, seconds(largest))),
                xytext=(12, 9), textcoords="offset points", fontsize=10, weight="bold",
                color=palette.readable(colour))


def _draw_point(ax, point, run, predicted, colour) -> Metric:
    bandwidth, size = point
    measured = run.seconds("all-reduce", bandwidth, size)
    style = {"marker": "o", "markerfacecolor": palette.PAPER} if point in FITTED else {
        "marker": "D"}
    ax.plot(size / 1e6, measured, color=colour, linestyle="", markersize=8, **style)
    if point in TRIED:
        ax.annotate(marks.with_minus(f"{measured / predicted - 1:+.1%}"), (size / 1e6, measured),
                    xytext=(10, -9), textcoords="offset points", fontsize=9.5,
                    color=palette.readable(colour))
    return Metric(f"all-reduce of {size / 1e6:g} MB, {link_name(bandwidth)}"
                  + " (fitted)" * (point in FITTED), measured, "s", predicted)


def _legend_of_fit() -> list[Line2D]:
    grey, dots = {"color": palette.MUTED}, {"linestyle": "", "markersize": 8}
    return [Line2D([], [], **grey, linewidth=1.4, label="predicted: α + bytes/β"),
            Line2D([], [], **grey, **dots, marker="o", markerfacecolor=palette.PAPER,
                   label="measured, fitted"),
            Line2D([], [], **grey, **dots, marker="D",
                   label="measured, not fitted, and how far from the line")]


def _at(fitted: LinkTime, bandwidth: str) -> LinkTime:
    """The fit for a link with another bandwidth than the one of FITTED."""
    return LinkTime(fitted.alpha, fitted.beta * read_bandwidth(bandwidth)
                    / read_bandwidth(FITTED[0][0]))


def _seconds(link_seconds, topology, time, size) -> float:
    return bytes_and_seconds(link_seconds, size, topology, time)[1]


def bytes_and_seconds(link_seconds, size, topology, time) -> tuple[float, float]:
    """The student's two numbers for a topology of several hosts."""
    what = (f"{size / 1e6:g} MB on {topology.hosts} hosts with {counted(topology.ranks, 'rank')} "
            "each")
    nbytes, seconds = require_numbers(
        link_seconds(size, topology.hosts, topology.ranks, time.alpha, time.beta),
        ("bytes", "seconds"), what)
    return float(nbytes), float(require_positive(seconds, f"{what}, seconds"))


def link_name(bandwidth: str) -> str:
    return f"{read_bandwidth(bandwidth) / 1e6:g} Mbit/s"


@shows("Bytes on the link")
def show_link_bytes(run: LinkRun | None = None) -> Picture:
    """Draws what each kind of collective sent over the link, as the kernel counted it, and what the
    formula of a ring says. run: None means that it is measured now."""
    run = run or measure_all_reduces()
    ranks = run.topology.world_size
    rows = [Bar(f"{one.what} of {one.size / 1e6:g} MB", one.sent / 1e6,
                _FORMULAS[one.what](one.size, ranks) / 1e6,
                guessed("6.5") if one.what == "all-reduce" else None,
                palette.COLLECTIVES[one.what.replace("-", "_")]) for one in run.counted]
    return bars(rows, "MB", "sent over host 0's link\nwith TCP's headers; "
                f"{ranks} ranks on {run.topology.hosts} hosts", note=run.note,
                lesson=_beside_ring(rows))


def _beside_ring(rows: list[Bar]) -> str:
    """How near the bytes are to the formula of a ring, and which row is not."""
    def apart(row) -> float:
        return abs(row.measured / row.predicted - 1)

    *others, far = sorted(rows, key=apart)
    if apart(far) < 0.1 or not others:
        return f"Bytes on the link: at most {apart(far):.0%} from the formula of a ring"
    return (f"{far.name}: {far.measured / far.predicted:.2g} times the bytes of a ring; the others "
            f"at most {apart(others[-1]):.0%} from it")
