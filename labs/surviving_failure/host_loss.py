"""A host is lost and replaced: the loss, what each host did, and where the seconds went."""

import html
from dataclasses import dataclass

import torch
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from labs.checks.verdicts import Wrong, shows
from labs.pictures import marks, palette
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.surviving_failure.elastic_charts import COLOURS, draw_restarts
from labs.surviving_failure.elastic_metrics import Metrics, run_again
from labs.surviving_failure.lost_host import FIRST, SPARE, TITLE, HostsRun
from labs.surviving_failure.restarts import (
    MET,
    NOTICED,
    OWN_STORE,
    PARTS,
    STOPPED,
    Restart,
    restart_after,
)

_LABELS = ("noticed", "stopped", "rendezvous", "Python starts", "loading", "run again")
_TRAINS = palette.TRAINS
_HEIGHT = 0.56
_WORDS = {"unplugged": "host {} is unplugged", "killed": "all processes on host {} are killed",
          "ended": "torchrun ends on host {}"}


@dataclass(frozen=True)
class Note:
    """A text that draws itself."""

    text: str

    def __repr__(self):
        return self.text

    def _repr_html_(self):
        lines = "".join(f"<div>{html.escape(line)}</div>" for line in self.text.splitlines())
        return f"<div style='max-width:{96 * WIDTH:.0f}px'>{lines}</div>"


@shows(TITLE)
def show_hosts(run: HostsRun) -> Picture:
    """Draws the loss over time, and below it what each host did: trained, or waited for what."""
    figure, (top, below) = canvas(WIDTH, 5.2 + marks.HEADLINE, nrows=2, sharex=True,
                                  gridspec_kw={"height_ratios": [2.2, 2]})
    # the rest of a failed job's line is torch's message
    marks.headline(figure, ":".join(repr(run).split(":")[:1]))
    again = {(step.step, step.began) for step in run_again(run.metrics.steps)}
    _draw_losses(top, run, again)
    _draw_hosts(below, run, _parts(run))
    for event in run.events:
        if event.what == "started" or event.host == SPARE:
            continue
        at, is_late = event.time - run.zero, event.time > run.lost.time
        for ax in (top, below):
            ax.axvline(at, color=palette.RANK_FAILED, linewidth=1.2)
        top.annotate(_WORDS[event.what].format(event.host), (at, 1),
                     xycoords=("data", "axes fraction"), xytext=(-4 if is_late else 4, -2),
                     ha="right" if is_late else "left", va="top", textcoords="offset points",
                     fontsize=9, color=palette.RANK_FAILED)
    below.set_yticks(range(3), [f"host {host}" for host in range(3)])
    below.set_ylim(2.6, -0.6)
    below.set_xlabel("seconds")
    top.set_ylabel("loss")
    top.grid(axis="y", color=palette.GRID)
    marks.legend_above(figure, [
        Patch(color=_TRAINS, label="trains"),
        *(Patch(color=COLOURS[part], label=label)
          for part, label in zip(PARTS, _LABELS, strict=True)),
        Patch(facecolor=palette.PAPER, edgecolor=palette.MUTED, linestyle=(0, (3, 2)),
              label="starts, waits"),
        Line2D([], [], linestyle="", marker="o", markerfacecolor="none", markersize=5,
               color=palette.INK, label="step run again"),
        Line2D([], [], linestyle="", marker="x", color=palette.RANK_FAILED, markeredgewidth=2,
               label="torchrun ends")])
    return Picture(figure, _words(run), data=run)


def _draw_losses(ax, run, again: set):
    for kind, face in ((False, _TRAINS), (True, "none")):
        found = [step for step in run.metrics.steps if ((step.step, step.began) in again) == kind]
        ax.plot([step.time - run.zero for step in found], [step.loss for step in found], "o",
                markersize=4.5, markerfacecolor=face, color=palette.INK, markeredgewidth=0.7)


def _draw_hosts(ax, run, restarts: dict[str, tuple[float, dict[str, float]]]):
    """Bars of training on each host, by the number of ranks, and on host 0 the restarts' parts."""
    lost = run.lost
    for left, right, ranks in _training_intervals(run.metrics):
        late = left > lost.time
        for host in [0] if ranks == 1 else [0, SPARE if late else FIRST]:
            ax.barh(host, right - left, left=left - run.zero, height=_HEIGHT, color=_TRAINS)
    for failed, seconds in restarts.values():
        end = failed
        for part, length in seconds.items():
            ax.barh(0, length, left=end - run.zero, height=_HEIGHT, color=COLOURS[part],
                    edgecolor=palette.PAPER, linewidth=0.5)
            end += length
    started = run.event("started", SPARE)
    trains = next((step.began for step in run.metrics.steps
                   if step.began > started.time and step.ranks == 2), None)
    end = trains or run.events[-1].time
    ax.barh(SPARE, end - started.time, left=started.time - run.zero, height=_HEIGHT,
            facecolor=palette.PAPER, edgecolor=palette.MUTED, linestyle=(0, (3, 2)))
    if ended := run.event("ended", SPARE):
        ax.plot(ended.time - run.zero, SPARE, "x", color=palette.RANK_FAILED, markersize=8,
                markeredgewidth=2)


def _training_intervals(metrics: Metrics) -> list[tuple[float, float, int]]:
    """(begin, end, ranks) of the steps of each start."""
    found = {}
    for step in metrics.steps:
        start = max(joined.time for joined in metrics.joined if joined.time <= step.began)
        # Steps between two (re)starts form one interval.
        began, _, ranks = found.get(start, (step.began, 0.0, step.ranks))
        found[start] = (began, step.time, ranks)
    return list(found.values())


def _restarts(run) -> dict[str, Restart]:
    """What happened -> the restart on host 0 that followed; those that came to an end."""
    found = {name: restart_after(failed, run.logs[0], run.metrics)
             for name, failed in _failures(run).items()}
    return {name: restart for name, restart in found.items() if restart}


def _failures(run) -> dict[str, float]:
    """What happened -> when, in seconds since the epoch."""
    lost = run.lost
    alone = [step.time for step in run.metrics.steps if step.ranks == 1]
    return ({f"host {lost.host} {lost.what}": lost.time}
            | ({f"host {SPARE} joins": max(alone)} if alone else {}))


def _parts(run) -> dict[str, tuple[float, dict[str, float]]]:
    """What happened -> (when, the seconds of each part of the restart); of one that never came to
    an end, until torchrun ended."""
    failures, found = _failures(run), _restarts(run)
    parts = {name: (failures[name], restart.seconds) for name, restart in found.items()}
    ended = run.event("ended", 0)
    for name in failures.keys() - found.keys() if ended else ():
        noticed = _first(run, "noticed", failures[name], ended.time)
        meets = _first(run, "rendezvous", noticed, ended.time)
        parts[name] = (failures[name], {NOTICED: noticed - failures[name],
                                        STOPPED: meets - noticed, MET: ended.time - meets})
    return parts


def _first(run, what, after, default) -> float:
    return min((event.time for event in run.logs[0] if event.what == what and event.time >= after),
               default=default)


def _words(run) -> str:
    lines = [f"{name}: " + ", ".join(f"{part} {seconds:.1f} s" for part, seconds in parts.items())
             for name, (_, parts) in _parts(run).items()]
    first = {step.step: step.loss for step in reversed(run.metrics.steps)}
    off = [abs(step.loss - first[step.step]) for step in run_again(run.metrics.steps)]
    if off:
        lines.append(f"{len(off)} steps are run again, with losses at most {max(off):.0e} off")
    return "\n".join([repr(run), *lines, *filter(None, [_end(run)])])


def _end(run) -> str:
    """When the job ended after the host with the store had been lost."""
    killed, ended = run.event("killed", 0), run.event("ended", SPARE)
    return (f"torchrun on host {SPARE} ended {ended.time - killed.time:.1f} s after all processes "
            "on host 0 were killed") if killed and ended else ""


@shows(TITLE)
def show_host_restarts(run: HostsRun) -> Picture:
    """Draws the seconds of each part of the restarts on host 0."""
    found = _restarts(run)
    if not found:
        raise Wrong("no restart came to an end in this run", code="no_restart")
    return draw_restarts(list(found), list(found.values()), axis="seconds since then")


@shows(TITLE)
def show_refusal(run: HostsRun) -> Note:
    """Says whether the replacement trained in a run without a store of its own, with this torch; if
    not, why, and which variable the next run needs."""
    version = torch.__version__.partition("+")[0]
    if run.accepted:
        return Note(f"torch {version} takes a replacement in by itself. torch 2.13 did not: there "
                    f"this run ended, and the variable of the next one was needed.")
    return Note(
        f"With torch {version} the replacement failed, and the host that was left failed with it:\n"
        f"    {run.error}\n"
        "Cause: the ranks of all restarts share one store. When it was made, host 0 wrote its "
        "address under the name of the first rendezvous, and does not write it again. The new host "
        "looks for it under the name of the second one.\n"
        f"Cure: {OWN_STORE}=1 on all hosts. Then each rendezvous makes a store of its own, and "
        "publishes its address.")
