"""What notebook 06 draws of the link between two hosts: bytes that the kernel counted and seconds,
with what formulas say of both."""

from collections.abc import Callable
from functools import partial

from matplotlib.lines import Line2D

from labs.exercises.guesses import guessed
from labs.exercises.numbers import require_numbers, require_positive
from labs.exercises.verdicts import Wrong, kind_of, shows
from labs.meters.metrics import Metric
from labs.pictures import marks, palette
from labs.pictures.bars import Bar, Panel, bars, side_by_side
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.pictures.tables import Table
from labs.predictions import hardware, strategy_choice, traffic
from labs.predictions.host_links import LinkTime, Topology, hierarchical_all_reduce
from labs.predictions.strategy_choice import STRATEGIES, Links
from labs.scaling.links.collectives import FITTED, TRIED
from labs.scaling.links.recorded import LinkRun
from labs.scaling.links.strategies import model_bytes, predicted_link_bytes, root_bytes
from labs.words import counted
from labs.workers.hosts.links import read_bandwidth

_FORMULAS = {"all-reduce": traffic.all_reduce, "all-gather": traffic.all_gather,
             "reduce-scatter": traffic.reduce_scatter}


@shows("6.5")
def show_fit(run: LinkRun, fitted: LinkTime, link_seconds: Callable) -> Picture:
    """Draws the measured seconds of all-reduces by size, those that were fitted and those that were
    not, and the lines that the student's function predicts, one for each bandwidth.

    β is proportional to the bandwidth; α stays as it is.
    """
    figure, ax = canvas(WIDTH, 3.7 + marks.NOTE_LINE * len(run.note.splitlines()))
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
    marks.legend_above(figure, _legend_of_fit())
    marks.note_below(figure, run.note)
    return Picture(figure, "\n".join([str(fitted), *_words_of_fit(metrics), *filter(None, [
        run.note])]), data=run, metrics=metrics)


def _draw_line(ax, bandwidth, largest, colour, measured, seconds):
    """The predicted seconds up to the largest size, with the bandwidth at its end, above what was
    measured there."""
    sizes = [largest * step / 20 for step in range(1, 21)]
    ax.plot([size / 1e6 for size in sizes], list(map(seconds, sizes)), color=colour, linewidth=1.4)
    ax.annotate(_name(bandwidth), (largest / 1e6, max(measured, seconds(largest))),
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
    return Metric(f"all-reduce of {size / 1e6:g} MB, {_name(bandwidth)}"
                  + " (fitted)" * (point in FITTED), measured, "s", predicted)


def _words_of_fit(metrics) -> list[str]:
    worst = max(abs(one.value / one.predicted - 1) for one in metrics
                if not one.name.endswith("(fitted)"))
    return [*(f"{one.name}: measured {one.value:.3f} s, predicted {one.predicted:.3f}"
              for one in metrics), f"largest error where nothing was fitted: {worst:.1%}"]


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
    return _bytes_and_seconds(link_seconds, size, topology, time)[1]


def _bytes_and_seconds(link_seconds, size, topology, time) -> tuple[float, float]:
    """The student's two numbers for a topology of several hosts."""
    what = (f"{size / 1e6:g} MB on {topology.hosts} hosts with {counted(topology.ranks, 'rank')} "
            "each")
    nbytes, seconds = require_numbers(
        link_seconds(size, topology.hosts, topology.ranks, time.alpha, time.beta),
        ("bytes", "seconds"), what)
    return float(nbytes), float(require_positive(seconds, f"{what}, seconds"))


def _name(bandwidth: str) -> str:
    return f"{read_bandwidth(bandwidth) / 1e6:g} Mbit/s"


@shows("Bytes on the link")
def show_link_bytes(run: LinkRun) -> Picture:
    """Draws what each kind of collective put on the link, as the kernel counted it, and what the
    formula of a ring says."""
    ranks = run.topology.world_size
    rows = [Bar(f"{one.what} of {one.size / 1e6:g} MB", one.sent / 1e6,
                _FORMULAS[one.what](one.size, ranks) / 1e6,
                guessed("6.5") if one.what == "all-reduce" else None,
                palette.COLLECTIVES[one.what.replace("-", "_")]) for one in run.counted]
    return bars(rows, "MB", "sent over host 0's link\nwith TCP's headers; "
                f"{ranks} ranks on {run.topology.hosts} hosts", note=run.note)


@shows("6.6")
def show_hierarchical(run: LinkRun) -> Picture:
    """Draws bytes and seconds of the flat and of the student's all-reduce."""
    size, ways = run.counted[0].size, ("flat", "hierarchical")
    ranks = run.topology.world_size
    predicted = [traffic.all_reduce(size, ranks), hierarchical_all_reduce(size, run.topology)]
    bandwidths = list(dict.fromkeys(one.bandwidth for one in run.timed))
    panels = [Panel("MB on the link", "MB", [run.sent(way) for way in ways], 1e6, predicted,
                    guessed=(None, guessed("6.6") and 1e6 * guessed("6.6")))]
    panels += [Panel(f"seconds, {_name(one)}", "s", [run.seconds(way, one) for way in ways],
                     predicted=[each / (read_bandwidth(one) / 8) for each in predicted],
                     colour=palette.PHASES["communication"]) for one in bandwidths]
    return side_by_side(ways, panels, "predicted: bytes by formula, and these bytes at the link's "
                        "bandwidth" + f"\n{run.note}" * bool(run.note))


@shows("6.5")
def show_on_gpus(link_seconds: Callable, size: float = 14e9, ranks: int = 8, inside: float = 450e9,
                 card: float = 50e9) -> Table:
    """Returns a table of both all-reduces by formula, on two hosts with GPUs: with a network card
    for each GPU, as in an H100 node, and with one card a host. inside, card: bytes per second in
    one direction, of a GPU's NVLink and of a card.

    NCCL uses all cards of a host at once, in rings as in trees
    (github.com/NVIDIA/nccl/issues/530), so that they count as one link with their sum.
    """
    rows = []
    for cards, name in ((ranks, "a card for each GPU"), (1, "one card a host")):
        time = LinkTime(0.0, cards * card)
        flat, seconds = _bytes_and_seconds(link_seconds, size, Topology(2, ranks), time)
        # the ranks of a host share its cards
        between, across = _bytes_and_seconds(link_seconds, size, Topology(2, 1), time)
        within = traffic.all_reduce(size, ranks)
        # a ring is as slow as its slowest edge, and each of its edges carries as much
        rows += [(name, "flat ring", flat, flat, max(seconds, flat / inside)),
                 (name, "hierarchical, step by step", between, within, across + within / inside),
                 (name, "hierarchical, in pieces", between, within, max(across, within / inside))]
    return Table(f"{size / 1e9:g} GB on two hosts with {ranks} GPUs each, {inside / 1e9:g} GB/s "
                 f"inside, cards of {8 * card / 1e9:g} Gbit/s, by formula",
                 ("cards", "all-reduce", "GB between hosts", "GB a GPU sends inside", "ms"),
                 [(*names, f"{sent / 1e9:.1f}", f"{within / 1e9:.1f}", f"{1e3 * seconds:.0f}")
                  for *names, sent, within, seconds in rows], left=1,
                 note="In pieces, as NCCL's trees do: while one piece is inside, the one before is "
                      "between the hosts. At best this takes the longer of the two.")


@shows("6.7")
def show_training(run: LinkRun) -> Picture:
    """Draws what a step of each strategy puts on the link, how long it takes, and what a rank keeps
    of the parameters."""
    names = [one.what for one in run.timed]
    size, root = model_bytes(), root_bytes()
    panels = [
        Panel("MB on the link a step", "MB", [run.sent(name) for name in names], 1e6,
              [predicted_link_bytes(name, size, root, run.topology) for name in names]),
        Panel(f"seconds a step, {_name(run.timed[0].bandwidth)}", "s",
              [one.seconds for one in run.timed], guessed=[
                  guessed("6.7") if name == "HSDP" else None for name in names],
              colour=palette.PHASES["communication"]),
        Panel("MB of parameters a rank", "MB", [run.sent(f"{name}, resident") for name in names],
              1e6, colour=palette.MEMORY["parameters"])]
    caption = (f"{size / 1e6:.1f} MB of parameters, {root / 1e6:.1f} of them at the root; "
               "predicted by ring algorithms\nZeRO-3 gathers the root again in backward; FSDP "
               "keeps it from forward on, and so gathers it once less")
    return side_by_side(names, panels, caption + f"\n{run.note}" * bool(run.note))


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
