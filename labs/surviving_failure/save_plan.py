"""Exercise 8.9: how often a large job saves, and its goodput."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.lines import Line2D

from labs.checks.generator import new_generator, unless_graded
from labs.checks.guesses import guessed
from labs.checks.numbers import (
    Cause,
    Mistake,
    common_cause,
    judge_number,
    require_named,
    require_number,
    require_positive,
    require_signature,
)
from labs.checks.verdicts import Wrong, check, shows
from labs.pictures import marks, palette
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.pictures.tables import Table
from labs.predictions.failures.intervals import asynchronous_goodput, daly, expected_goodput, young
from labs.predictions.failures.reports import RATES
from labs.surviving_failure.intervals import RUN_COLOURS

NAMES = ("interval", "goodput")
ARGUMENTS = ("gpus", "gpu_hours", "checkpoint_bytes", "bandwidth", "restart")
WORSE = 0.002  # of the goodput: the minimum is flat, and Young's interval is off by less mostly
TOLERANCE = 0.01  # of the goodput, against the closed form


@dataclass(frozen=True)
class Cluster:
    """gpus: of the job; gpu_hours: mean hours between two failures of one GPU and what belongs to
    it; bandwidth: of the storage, bytes per second of all ranks together; restart: seconds."""

    gpus: int
    gpu_hours: float
    checkpoint_bytes: float
    bandwidth: float
    restart: float

    @property
    def mtbf(self) -> float:
        """Seconds between two failures of the job."""
        return 3600 * self.gpu_hours / self.gpus

    @property
    def save(self) -> float:
        """Seconds of a save in which nobody computes."""
        return self.checkpoint_bytes / self.bandwidth

    def goodput(self, interval: float) -> float:
        """Of a job that saves so often, by Daly's expected wall time."""
        return expected_goodput(interval, self.save, self.restart, self.mtbf)

    def __str__(self) -> str:
        return (f"{self.gpus:,} GPUs, {self.gpu_hours:,.0f} hours between failures of one, "
                f"{self.checkpoint_bytes / 1e12:.3g} TB at {self.bandwidth / 1e9:,.4g} GB/s, "
                f"restart {self.restart:.0f} s")


# Llama 3's rate of failures; 16 bytes of a parameter are 14 without the gradient.
LLAMA = Cluster(16_384, 50_677, 14 * 405e9, 2e12, 600)
CLUSTERS = (LLAMA, Cluster(992, 13_800, 14 * 175e9, 40e9, 900),
            Cluster(8, 50_000, 14 * 8e9, 1e9, 120), Cluster(65_536, 30_000, 14 * 1e12, 5e11, 300),
            # Daly's third job: a save takes a third of the time between two failures.
            Cluster(60_000, 15_000, 3e12, 1e10, 600))


@check("8.9")
def check_save_plan(save_plan: Callable):
    """save_plan(gpus, gpu_hours, checkpoint_bytes, bandwidth, restart) -> {"interval": seconds of
    computing between two saves, "goodput": the fraction of the wall time that is kept}."""
    require_signature(save_plan, ARGUMENTS)
    clusters = [*CLUSTERS, *random_cases()]
    answers = [_planned(save_plan, cluster) for cluster in clusters]
    intervals = [answer["interval"] for answer in answers]
    for at, (cluster, answer) in enumerate(zip(clusters, answers, strict=True)):
        _judge_interval(cluster, answer["interval"], intervals, at, clusters)
        # At the student's own interval, so that a wrong interval is not reported as a wrong
        # goodput.
        own = cluster.goodput(answer["interval"])
        judge_number(answer["goodput"], own, _causes(cluster, answer["interval"]),
                     f"{cluster}: goodput with your interval of {answer['interval']:,.0f} s",
                     hint="Work over wall time: your wall_time on a long job, or Daly's formula.",
                     rel_tol=TOLERANCE)
    best = LLAMA.goodput(answers[0]["interval"])
    return (f"{len(clusters)} jobs keep the most of their time that they can; a 405B job on 16,384 "
            f"GPUs keeps {best:.1%}")


def _planned(save_plan, cluster) -> dict:
    try:
        answer = save_plan(*vars(cluster).values())
    except OverflowError as error:
        # expected_wall grows like e^(interval / mtbf): an mtbf in hours is 3,600 times too small
        raise Wrong(f"{cluster}: save_plan raised OverflowError: {error}. Some interval, save or "
                    "restart is hundreds of times as long as the time between two failures",
                    "Are all times in seconds? gpu_hours is in hours.", code="overflow") from error
    return require_named(answer, NAMES, f"{cluster}: save_plan")


def random_cases() -> list[Cluster]:
    """Jobs whose saves take from a thousandth to a twentieth of the time between two failures."""
    rng, clusters = new_generator(), []
    for _ in range(8):
        gpus, hours = 2 ** rng.randrange(3, 17), rng.uniform(8e3, 6e4)
        mtbf = 3600 * hours / gpus
        save = mtbf * 10 ** rng.uniform(-3, -1.3)
        parameters = 10 ** rng.uniform(9.5, 12)
        clusters.append(Cluster(gpus, hours, 14 * parameters, 14 * parameters / save,
                                mtbf * rng.uniform(0.01, 0.3)))
    return clusters


def _judge_interval(cluster, interval, intervals, at, clusters):
    interval = require_positive(interval, f"{cluster}: interval")
    best = daly(cluster.mtbf, cluster.save)
    kept, most = cluster.goodput(interval), cluster.goodput(best)
    # The goodput is judged, not the interval: its curve is flat near the maximum.
    if kept >= most - WORSE:
        return
    cause = common_cause(MISTAKES, clusters, intervals, at)
    why = f": {cause[0].sentence}" if cause else ""
    often = "often" if interval < best else "seldom"
    raise Wrong(f"{cluster}: with {interval:,.5g} s between two saves the goodput is {kept:.1%}; "
                f"with {unless_graded(f'{best:,.5g}')} s it would be "
                f"{unless_graded(f'{most:.1%}')}"
                f"{why or f'. It saves too {often}'}",
                cause[0].hint if cause else "The mean time between failures of the job is that of "
                "one GPU, divided by the GPUs.", code=cause[0].code if cause else "not_optimal")


def _causes(cluster, interval):
    """Goodputs with one thing left out, at the student's own interval."""
    mtbf, save, restart = cluster.mtbf, cluster.save, cluster.restart
    only_saves = interval / (interval + save)
    lost = (interval / 2 + restart) / mtbf
    rough = ("a first order estimate: half an interval lost in each mean time between failures. "
             "With long saves or many failures it is too rough")
    leaves_out = "A failure may come during a save or a restart, and in work that is done again."
    # The first order comes first: 1 - lost may be within 1 % of it.
    return [Cause("first_order", 1 / (1 + save / interval + lost),
                  f"1 / (1 + δ/τ + (τ/2 + R)/M), {rough}", leaves_out),
            Cause("first_order", 1 - save / interval - lost, f"1 − δ/τ − (τ/2 + R)/M, {rough}",
                  leaves_out),
            Cause("first_order", only_saves - lost, rough, leaves_out),
            Cause("failures_cost_nothing", only_saves, "failures cost nothing",
                  "They lose work, and a restart follows."),
            Cause("saving_costs_nothing", 1 - lost, "saving costs nothing",
                  "Nobody computes while the job saves."),
            Cause("restarts_cost_nothing", expected_goodput(interval, save, 0, mtbf),
                  "restarts cost nothing", "A restart follows each failure."),
            Cause("wall_time_over_work", 1 / cluster.goodput(interval),
                  "that is wall time over work", "Turn it over."),
            Cause("in_percent", 100 * cluster.goodput(interval), "that is in percent",
                  "A share is at most 1.")]


MISTAKES: list[Mistake] = [
    Mistake("for_failures_one_gpu", lambda job: young(3600 * job.gpu_hours, job.save),
            "that is for the failures of one GPU",
            "The job ends when any of its GPUs fails: divide by their number."),
    Mistake("hours_where_seconds_belong", lambda job: young(job.mtbf / 3600, job.save),
            "hours where seconds belong", "An hour has 3,600 s."),
    Mistake("factor_2_missing", lambda job: math.sqrt(job.mtbf * job.save),
            "√(δM): the 2 is missing", "√(2δM)."),
    Mistake("half_time_between_two_failures", lambda job: job.mtbf / 2,
            "that is half the time between two failures", "What does a save cost?"),
    Mistake("time_between_two_failures", lambda job: job.mtbf,
            "that is the time between two failures", "What does a save cost?"),
    Mistake("young_formula", lambda job: young(job.mtbf, job.save),
            "that is √(2δM), too long where a save takes a large part of the time between two "
            "failures", "Daly's formula has further terms. Or look for the minimum: your wall_time "
            "says what any interval costs."),
    Mistake("young_less_save", lambda job: young(job.mtbf, job.save) - job.save,
            "that is √(2δM) − δ, too short where a save takes a large part of the time between two "
            "failures", "Daly's formula has further terms. Or look for the minimum: your wall_time "
            "says what any interval costs."),
    Mistake("restart_for_save", lambda job: young(job.mtbf, job.restart),
            "that is √(2RM), with the restart",
            "A restart costs the same however often you save: the save is what counts."),
    Mistake("every_3_hours_whatever_job", lambda job: 10_800.0, "every 3 hours, whatever the job",
            "What do a save and a failure cost?"),
]
# Bytes of a parameter in a checkpoint: bf16, and in fp32 a copy and Adam's two moments.
CHECKPOINT_BYTES = 2 + 4 + 4 + 4
MODELS = {"7B": 7e9, "70B": 70e9, "175B": 175e9, "405B": 405e9, "1T": 1e12}


def show_checkpoint_sizes(bandwidths: tuple[float, ...] = (2e9, 100e9, 2e12)) -> Table:
    """Sizes of full checkpoints, and seconds to write them at these bytes per second."""
    rows = [(name, f"{CHECKPOINT_BYTES * parameters / 1e12:,.3g} TB",
             *(_seconds(CHECKPOINT_BYTES * parameters / bandwidth) for bandwidth in bandwidths))
            for name, parameters in MODELS.items()]
    head = ("model", "checkpoint", *(f"at {bandwidth / 1e9:,.0f} GB/s" for bandwidth in bandwidths))
    return Table("Parameters in bf16, fp32 copy and Adam's moments", head, rows,
                 note="2 GB/s is one fast SSD, 2 TB/s the storage of Llama 3's cluster.")


def show_failure_rates() -> Table:
    """How often reported jobs failed, and how often one of their GPUs would, if the MTBF of a job
    is that of a GPU divided by their number."""
    rows = [(rate.name, f"{rate.gpus:,}", f"{rate.mtbf_hours:.1f} h",
             f"{rate.mtbf_hours * rate.gpus:,.0f} h") for rate in RATES]
    return Table("Mean time between failures", ("job", "GPUs", "of the job", "of one GPU"), rows)


def _seconds(seconds) -> str:
    return f"{seconds / 60:,.0f} min" if seconds > 120 else f"{seconds:,.3g} s"


@shows("8.9")
def show_goodput(save_plan: Callable) -> Picture:
    """Draws which share of its time a 405B job keeps over the bandwidth of its storage, for three
    numbers of GPUs: by the student's plan, which saves synchronously, and where the job computes
    while it writes one checkpoint after the other."""
    llama = CLUSTERS[0]
    bandwidths = [1e10 * 10 ** (at / 4) for at in range(13)]
    guess = guessed("8.9")
    figure, ax = canvas(WIDTH, 3.6 + marks.HEADLINE + marks.NOTE_LINE * (guess is not None))
    words, drawn = [], {}
    for gpus, colour in zip((1024, 16_384, 131_072), RUN_COLOURS[1:], strict=False):
        shares = [_share(save_plan, gpus, bandwidth) for bandwidth in bandwidths]
        ax.plot(bandwidths, shares, "o-", color=colour, markersize=5, linewidth=1.4,
                label=f"{gpus:,} GPUs, a failure every {_hours(llama.gpu_hours / gpus)}")
        beside = [_asynchronous_share(gpus, bandwidth) for bandwidth in bandwidths]
        ax.plot(bandwidths, beside, "--", color=colour, linewidth=1.4)
        drawn[gpus] = dict(zip(bandwidths, shares, strict=True))
        words.append(f"{gpus:,} GPUs: {shares[0]:.1%} at {bandwidths[0] / 1e9:,.0f} GB/s, "
                     f"{shares[-1]:.1%} at {bandwidths[-1] / 1e9:,.0f} GB/s; saved asynchronously "
                     f"{beside[0]:.1%} and {beside[-1]:.1%}")
    lesson = (f"{gpus:,} GPUs keep {shares[0]:.0%} of their time at "
              f"{bandwidths[0] / 1e9:,.0f} GB/s, {shares[-1]:.0%} at {bandwidths[-1] / 1e9:,.0f}")
    answer = marks.answered(guess, 100 * _share(save_plan, llama.gpus, llama.bandwidth), "%")
    marks.headline(figure, lesson)
    marks.note_below(figure, answer)
    if guess is not None:
        ax.plot(llama.bandwidth, guess / 100, label="your guess", linestyle="", zorder=5,
                **marks.GUESS_MARKER)
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter(lambda value, _: f"{value / 1e9:,g} GB/s")
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    ax.set_ylim(0, 1.03)
    ax.grid(axis="y", color=palette.GRID)
    ax.set_xlabel("bandwidth of the storage, all ranks together")
    ax.set_ylabel("goodput")
    marks.legend_above(figure, [*ax.get_legend_handles_labels()[0], Line2D(
        [], [], color=palette.MUTED, linestyle="--", label="saved asynchronously")])
    return Picture(figure, "\n".join([
        lesson, f"a 405B job with Llama 3's failures per GPU, restart {llama.restart:.0f} s",
        *words, *filter(None, [answer])]), data=drawn)


def _share(save_plan, gpus, bandwidth) -> float:
    llama = CLUSTERS[0]
    job = Cluster(gpus, llama.gpu_hours, llama.checkpoint_bytes, bandwidth, llama.restart)
    plan = save_plan(*vars(job).values())
    return require_number(plan["goodput"], f"goodput with {gpus:,} GPUs")


def _asynchronous_share(gpus, bandwidth) -> float:
    llama = CLUSTERS[0]
    write = llama.checkpoint_bytes / bandwidth
    return asynchronous_goodput(write, write, llama.restart, 3600 * llama.gpu_hours / gpus)


def _hours(hours) -> str:
    return f"{hours:,.0f} h" if hours >= 2 else f"{math.ceil(60 * hours)} min"
