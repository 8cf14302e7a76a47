"""What a student calls: the recorded step, the runs with one fault each, and what a reader of the
student's own finds in their files."""

import random
from dataclasses import dataclass

from labs.checks.verdicts import shows
from labs.fsdp_profiling import recorded_runs
from labs.fsdp_profiling.injected_faults import prefetch_forward, without_prefetch
from labs.fsdp_profiling.recorded_runs import RecordedRun, RunConfig
from labs.meters import trace_units
from labs.meters.trace import Collective, Trace
from labs.pictures import timelines
from labs.pictures.picture import Picture
from labs.training.presets import Preset
from labs.workers import variant

LIBRARIES = ("torch/", "transformers/", "multiprocessing/", "threading.py", "nn.Module: ",
             "<built-in", "<string>", "labs/workers/")
"""Words by which the frame of a library is known; other frames are somebody's own code."""
CAUSES = {
    "nothing": "no evidence: the value None",
    "item": "one of trace.item_calls: a call that the healthy run does not have",
    "tiny units": "a number: how many all-gathers one rank's step has",
    "one huge unit": "the collective with the most bytes, one of trace.collectives",
    "no prefetch": "a string: the name of a unit that was gathered late",
    "slow data loader": "the label that took long, one of trace.labels",
    "slow rank": "a number: which rank"}
"""Cause -> the evidence that goes with it."""
# All prefetch in forward too, as on a GPU, where the CPU runs ahead: then the fault costs most.
_FAULTS = {
    "nothing": {}, "item": {"fault": "item"}, "tiny units": {"units": "layers"},
    "one huge unit": {"units": "model"}, "no prefetch": {"configure": without_prefetch},
    "slow data loader": {"fault": "data"}, "slow rank": {"fault": "rank"}}


@dataclass(frozen=True)
class SlowRuns:
    """runs: letter -> one trace per rank of a run with one fault; answers: letter -> cause.
    healthy: the traces of a run without a fault."""

    healthy: RecordedRun
    runs: dict[str, RecordedRun]
    answers: dict[str, str]

    def __repr__(self):
        lines = [f"{name}, {max(traces, key=lambda trace: trace.seconds)}" for name, traces in
                 [("healthy", self.healthy), *((f"run {letter}", traces)
                                               for letter, traces in self.runs.items())]]
        return "\n".join([*lines, self.runs["A"].files])


@shows("Recorded steps")
def record_fsdp(preset: Preset, name: str = "healthy", **changes) -> RecordedRun:
    """Trains FSDP2 and returns one recorded step of every rank. name: of the files; changes: fields
    of `recorded_runs.RunConfig`, such as `record`, the student's function."""
    config = RunConfig(preset, name, **changes)
    recordings = 1 if config.stacks else recorded_runs.RECORDINGS  # with stacks files are large
    return recorded_runs.record_clearly([config], recorded_runs.FEW_ROUNDS, recordings)[0]


def slow_runs(seed: int = 0) -> SlowRuns:
    """Records a healthy run and one for each cause, in an order that `seed` decides. The files are
    named as the runs are."""
    generator = random.Random(variant.seed_of(seed))
    causes = list(CAUSES)[1:]
    generator.shuffle(causes)
    sizes, letters = recorded_runs.preset(), "ABCDEFGH"[:len(causes)]
    healthy, *runs = recorded_runs.record_clearly(
        [config_with("nothing", sizes, "healthy run"),
         *(config_with(cause, sizes, f"run {letter}", generator.randrange(sizes.ranks))
           for letter, cause in zip(letters, causes, strict=True))],
        recorded_runs.FEW_ROUNDS, recorded_runs.FEW_RECORDINGS, recorded_runs.SLOW_BYTES,
        beside_first=True)
    return SlowRuns(healthy, dict(zip(letters, runs, strict=True)),
                    dict(zip(letters, causes, strict=True)))


def config_with(cause: str, preset: Preset, name: str, slow_rank: int = 0) -> RunConfig:
    """Returns the configuration of a run that has this cause."""
    return RunConfig(preset, name, slow_rank=slow_rank,
                     **{"configure": prefetch_forward, **_FAULTS[cause]})


@shows("One recorded step")
def show_timeline(run: RecordedRun) -> Picture:
    """Draws every rank's step: what it computes, unit by unit, and which collectives are in
    flight."""
    recorded_runs.require_usual({run.config.name: run})
    return timelines.by_rank({run.config.name: list(run)})


def non_fsdp_collectives(trace: Trace) -> list[Collective]:
    """Returns the collectives that serve no unit of FSDP."""
    return [one for one in trace.collectives if not trace_units.owner(trace, one).unit]
