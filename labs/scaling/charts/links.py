"""What notebook 06 draws of the link between two hosts: bytes that the kernel counted and seconds,
with what formulas say of both."""

from collections.abc import Callable

from labs.exercises.guesses import guessed
from labs.exercises.verdicts import Wrong, shows
from labs.meters.metrics import Metric
from labs.pictures import marks, palette
from labs.pictures.bars import Bar, Panel, bars, side_by_side
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.pictures.tables import Table
from labs.predictions import strategy_choice, traffic
from labs.predictions.host_links import LinkTime, Topology, hierarchical_all_reduce
from labs.predictions.strategy_choice import STRATEGIES, Links
from labs.scaling.links.collectives import FITTED, TRIED
from labs.scaling.links.recorded import LinkRun
from labs.scaling.links.strategies import model_bytes, predicted_link_bytes
from labs.workers.hosts.links import read_bandwidth

_FORMULAS = {"all-reduce": traffic.all_reduce, "all-gather": traffic.all_gather,
             "reduce-scatter": traffic.reduce_scatter}


@shows("6.5")
def show_fit(run: LinkRun, fitted: LinkTime, link_seconds: Callable) -> Picture:
    """Draws the measured seconds of all-reduces by size, those that were fitted and those that were
    not, and the lines that the student's function predicts, one for each bandwidth.

    β is proportional to the bandwidth; α stays as it is.
    """
    figure, ax = canvas(WIDTH, 3.7)
    words, metrics = [], []
    for number, bandwidth in enumerate(dict.fromkeys(name for name, _ in (*FITTED, *TRIED))):
        colour = palette.RANKS[number]
        time = _at(fitted, bandwidth)
        largest = max(size for name, size in (*FITTED, *TRIED) if name == bandwidth)
        sizes = [largest * step / 20 for step in range(1, 21)]
        ax.plot([size / 1e6 for size in sizes], [_seconds(link_seconds, size, run, time)
                                                 for size in sizes], color=colour, linewidth=1.4)
        for points, style in ((FITTED, {"marker": "o", "markerfacecolor": palette.PAPER}),
                              (TRIED, {"marker": "D"})):
            for _, size in [point for point in points if point[0] == bandwidth]:
                measured = run.seconds("all-reduce", bandwidth, size)
                predicted = _seconds(link_seconds, size, run, time)
                ax.plot(size / 1e6, measured, color=colour, linestyle="", markersize=8, **style)
                words.append(f"{_name(bandwidth)}, {size / 1e6:g} MB: measured {measured:.3f} s, "
                             f"predicted {predicted:.3f}{' (fitted)' * (points is FITTED)}")
                metrics.append(Metric(f"all-reduce of {size / 1e6:g} MB, {_name(bandwidth)}",
                                      measured, "s", predicted))
                if points is TRIED:
                    ax.annotate(f"{measured / predicted - 1:+.1%}", (size / 1e6, measured),
                                xytext=(9, -4), textcoords="offset points", fontsize=9.5,
                                color=palette.readable(colour), **marks.ON_PAPER)
        ax.annotate(_name(bandwidth), (largest / 1e6, _seconds(link_seconds, largest, run, time)),
                    xytext=(34, 3), textcoords="offset points", fontsize=10, weight="bold",
                    color=palette.readable(colour))
    ax.set(xlabel="MB of the tensor", ylabel="seconds of an all-reduce")
    ax.set_xlim(0, 4.9)
    ax.set_ylim(0)
    ax.grid(axis="y", color=palette.GRID)
    ax.set_axisbelow(True)
    marks.legend_above(figure, _legend_of_fit())
    worst = max(abs(one.value / one.predicted - 1) for one in metrics[-len(TRIED):])
    return Picture(figure, "\n".join([str(fitted), *words, f"largest error where nothing was "
                                      f"fitted: {worst:.1%}", *filter(None, [run.note])]),
                   data=run, metrics=metrics)


def _legend_of_fit():
    from matplotlib.lines import Line2D

    return [Line2D([], [], color=palette.MUTED, linewidth=1.4, label="predicted: α + bytes/β"),
            Line2D([], [], color=palette.MUTED, linestyle="", marker="o", markersize=8,
                   markerfacecolor=palette.PAPER, label="measured, fitted"),
            Line2D([], [], color=palette.MUTED, linestyle="", marker="D", markersize=8,
                   label="measured, not fitted, and the error")]


def _at(fitted: LinkTime, bandwidth: str) -> LinkTime:
    """The fit for a link with another bandwidth than the one of FITTED."""
    return LinkTime(fitted.alpha, fitted.beta * read_bandwidth(bandwidth)
                    / read_bandwidth(FITTED[0][0]))


def _seconds(link_seconds, size, run, time) -> float:
    answer = link_seconds(size, run.topology.hosts, run.topology.ranks, time.alpha, time.beta)
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        raise Wrong("link_seconds does not return bytes and seconds", "See its check above.")
    return float(answer[1])


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
    return bars(rows, "MB", f"that host 0 sent over its link, with headers; {ranks} ranks on "
                f"{run.topology.hosts} hosts", note=run.note)


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


@shows("6.7")
def show_training(run: LinkRun) -> Picture:
    """Draws what a step of each strategy puts on the link, how long it takes, and what a rank keeps
    of the parameters."""
    names = [one.what for one in run.timed]
    size = model_bytes()
    panels = [
        Panel("MB on the link a step", "MB", [run.sent(name) for name in names], 1e6,
              [predicted_link_bytes(name, size, run.topology) for name in names]),
        Panel(f"seconds a step, {_name(run.timed[0].bandwidth)}", "s",
              [one.seconds for one in run.timed], guessed=[
                  guessed("6.7") if name == "HSDP" else None for name in names],
              colour=palette.PHASES["communication"]),
        Panel("MB of parameters a rank", "MB", [run.sent(f"{name}, resident") for name in names],
              1e6, colour=palette.MEMORY["parameters"])]
    return side_by_side(names, panels, f"{size / 1e6:.1f} MB of parameters, fp32; predicted: by "
                        "ring algorithms" + f"\n{run.note}" * bool(run.note))


@shows("6.8")
def show_choice(choose_strategy: Callable, memory: float = 60e9, ranks: int = 8) -> Table:
    """Returns a table of what the student's rule chooses for three models on several clusters, with
    the modelled milliseconds of each strategy's collectives."""
    rows = []
    for parameters in (1.3e9, 7e9, 70e9):
        for hosts in (2, 16):
            for name, links in _CLUSTERS.items():
                topology = Topology(hosts, ranks)
                times = [_modelled(each, parameters, memory, topology, links)
                         for each in STRATEGIES]
                chosen = choose_strategy(parameters, memory, hosts, ranks, links.inside,
                                         links.across)
                rows.append((f"{parameters / 1e9:g}B", f"{hosts} × {ranks}", name, *times, chosen))
    return Table(f"{memory / 1e9:g} GB for states on a GPU: ms of collectives in a step",
                 ("model", "GPUs", "links inside, across", *STRATEGIES, "your choice"), rows,
                 left=2, note="– : the model states do not fit.")


_CLUSTERS = {"NVLink 300 GB/s, 400 Gbit/s": Links(300e9, 50e9),
             "PCIe 25 GB/s, 10 Gbit/s": Links(25e9, 1.25e9)}


def _modelled(strategy, parameters, memory, topology, links) -> str:
    if strategy_choice.held_bytes(strategy, parameters, topology) > memory:
        return "–"
    return f"{1e3 * strategy_choice.step_seconds(strategy, parameters, topology, links):,.0f}"
