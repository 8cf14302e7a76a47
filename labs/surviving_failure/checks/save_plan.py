"""Exercise 8.9: how often a large job saves, and which share of its time is kept work."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from labs.exercises.generator import new_generator
from labs.exercises.numbers import (
    Cause,
    Mistake,
    common_cause,
    judge_number,
    require_named,
    require_positive,
    require_signature,
)
from labs.exercises.verdicts import Wrong, check
from labs.predictions.failures.intervals import daly, expected_goodput, young

NAMES = ("interval", "goodput")
ARGUMENTS = ("gpus", "gpu_hours", "checkpoint_bytes", "bandwidth", "restart")
WORSE = 0.002  # of the goodput: the least is flat, and Young's interval is off by less mostly
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
    computing between two saves, "goodput": the share of the time that is kept work}."""
    require_signature(save_plan, ARGUMENTS)
    clusters = [*CLUSTERS, *_drawn()]
    answers = [_planned(save_plan, cluster) for cluster in clusters]
    intervals = [answer["interval"] for answer in answers]
    for at, (cluster, answer) in enumerate(zip(clusters, answers, strict=True)):
        _judge_interval(cluster, answer["interval"], intervals, at, clusters)
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


def _drawn() -> list[Cluster]:
    """Jobs whose saves take from a thousandth to a twentieth of the time between two failures."""
    dice, clusters = new_generator(), []
    for _ in range(8):
        gpus, hours = 2 ** dice.randrange(3, 17), dice.uniform(8e3, 6e4)
        mtbf = 3600 * hours / gpus
        save = mtbf * 10 ** dice.uniform(-3, -1.3)
        parameters = 10 ** dice.uniform(9.5, 12)
        clusters.append(Cluster(gpus, hours, 14 * parameters, 14 * parameters / save,
                                mtbf * dice.uniform(0.01, 0.3)))
    return clusters


def _judge_interval(cluster, interval, intervals, at, clusters):
    interval = require_positive(interval, f"{cluster}: interval")
    best = daly(cluster.mtbf, cluster.save)
    kept, most = cluster.goodput(interval), cluster.goodput(best)
    if kept >= most - WORSE:
        return
    cause = common_cause(MISTAKES, clusters, intervals, at)
    why = f": {cause[0].sentence}" if cause else ""
    often = "often" if interval < best else "seldom"
    raise Wrong(f"{cluster}: with {interval:,.5g} s between two saves {kept:.1%} of the time is "
                f"kept work; with {best:,.5g} s it would be {most:.1%}"
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
            "failures", "Daly's formula has further terms. Or look for the least: your wall_time "
            "says what any interval costs."),
    Mistake("young_less_save", lambda job: young(job.mtbf, job.save) - job.save,
            "that is √(2δM) − δ, too short where a save takes a large part of the time between two "
            "failures", "Daly's formula has further terms. Or look for the least: your wall_time "
            "says what any interval costs."),
    Mistake("restart_for_save", lambda job: young(job.mtbf, job.restart),
            "that is √(2RM), with the restart",
            "A restart costs the same however often you save: the save is what counts."),
    Mistake("every_3_hours_whatever_job", lambda job: 10_800.0, "every 3 hours, whatever the job",
            "What do a save and a failure cost?"),
]
