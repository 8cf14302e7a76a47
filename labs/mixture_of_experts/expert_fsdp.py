"""Exercise 9.8: experts sharded over the ranks that have the same, all else over all ranks."""

from collections.abc import Callable

import torch.distributed as dist

from labs.checks.on_ranks import on_ranks
from labs.checks.verdicts import check, shows
from labs.mixture_of_experts import fsdp_memory, replayed_step
from labs.mixture_of_experts.expert_fsdp_trial import (
    STEPS,
    TRIALS,
    WITH_SGD,
    build,
    try_on_rank,
)
from labs.mixture_of_experts.expert_meshes import Meshes
from labs.mixture_of_experts.fsdp_memory import BOTH, EP, FSDP
from labs.mixture_of_experts.replayed_step import Pace
from labs.pictures import palette, timelines
from labs.pictures.bars import Panel, side_by_side
from labs.pictures.picture import Picture
from labs.training import data
from labs.training.mixtures import Mixture
from labs.training.models import move_to_rank
from labs.words import to_within
from labs.workers import devices
from labs.workers.launcher import launch


@check("9.8", hints={
    "PREMUL_SUM": "gloo cannot multiply while it sums: set_force_sum_reduction_for_comms(True) of "
                  "the experts' unit makes FSDP sum first, and divide afterwards.",
    "has no attribute 'set_": "fully_shard comes first: it gives the module these methods."})
def check_expert_fsdp(expert_fsdp: Callable):
    """expert_fsdp(model, optimizer_class, mesh, everyone, **settings) -> (model, optimizer)."""
    difference = max(on_ranks(try_on_rank, expert_fsdp, world_sizes=tuple(TRIALS), hang_after=15.0,
                              timeout=60.0))
    return (f"equals one process for {STEPS} steps with SGD on 2 × 2 × 2 ranks and with AdamW on "
            f"2 × 2 ({to_within(difference)}); a rank has a quarter of all states, and gathers a "
            "block with its part of the experts at most")


MB = 1e6


@shows("9.8")
def show_memory(expert_fsdp: Callable) -> Picture:
    """Draws what rank 0 of 4 has in memory under EP 2, under FSDP and under both, measured beside
    predictions. expert_fsdp: the student's."""
    found, expected = fsdp_memory.measured(expert_fsdp), fsdp_memory.predicted()

    def panel(title, pick, colour=palette.PLAIN):
        return Panel(title, "MB", [pick(found[name]) for name in found], MB,
                     [_bytes(pick(expected[name])) for name in found], colour=colour)

    panels = [panel("states, after a step", lambda one: one.states),
              panel("saved for backward", lambda one: one.activations,
                    palette.MEMORY["activations"]),
              panel("gathered at once, at most", lambda one: one.gathered,
                    palette.MEMORY["buffers"])]
    states = [_bytes(found[name].states) / MB for name in (EP, BOTH)]
    gathered = [found[name].gathered / MB for name in (FSDP, BOTH)]
    return side_by_side(
        list(found), panels,
        lesson=f"FSDP in addition to EP 2: {states[1]:.1f} instead of {states[0]:.1f} MB of states."
               f" EP 2 in addition to FSDP: {gathered[1]:.1f} instead of {gathered[0]:.1f} MB "
               "gathered",
        note=f"rank 0 of {fsdp_memory.RANKS}; predictions are off by {_largest_error(panels)} at "
             "most\npredicted: states and gathered parameters by formulas, what is saved by a "
             "single process with a rank's tokens")


def _bytes(value) -> float:
    return getattr(value, "total", value)


def _largest_error(panels) -> str:
    errors = [abs(_bytes(value) - tick) / tick for panel in panels
              for value, tick in zip(panel.values, panel.predicted, strict=True) if tick]
    return f"{max(errors):.1%}".replace("%", " %")


TRACED = 4  # ranks, 2 × 2
SEQUENCES, CONTEXT = 16, 64  # of a rank
# All that a rank sends in the step takes this share of the time in which it computes. The step
# computes for so long; a collective's latency is this share of it.
SENDS, SECONDS, LATENCY = 0.7, 0.1, 0.002
_LANES = {"all_to_all": "all-to-alls", "all_gather": "all-gathers",
          "reduce_scatter": "reduce-scatters"}


@shows("9.8")
def show_trace(expert_fsdp: Callable) -> Picture:
    """Draws a step of one rank of 4: the order of collectives and computing is recorded, seconds
    are those of a stated pace. expert_fsdp: the student's."""
    events = launch(_events, expert_fsdp, ranks=TRACED, quiet=True, hang_after=30.0)[0]
    sent = sum(replayed_step.sent(event) for event in events)
    pace = Pace(events[-1].flops / SECONDS, sent / (SENDS * SECONDS), LATENCY * SECONDS)
    trace = replayed_step.replay(events, pace)
    seconds = {kind: trace.seconds_of(kind) for kind in _LANES}
    exposed = {kind: f"{found['exposed'] / found['total']:.0%}".replace("%", " %")
               for kind, found in seconds.items() if found["total"]}
    return timelines.by_rank(
        {"EP 2 and FSDP": [trace]},
        lesson="Exposed: " + ", ".join(f"{_LANES[kind]} {share}"
                                       for kind, share in exposed.items()),
        note="The order is that of a recorded step. The pace is stated: it computes for "
             f"{SECONDS * 1e3:.0f} ms,\nand all bytes take {SENDS:g} times as long. In forward a "
             "short all-to-all, of the counts, comes before the rows'.")


def _events(expert_fsdp) -> list[replayed_step.Event]:
    meshes = Meshes.of(2, 2)
    model = move_to_rank(Mixture(layers=3, hidden=64, ffn=128, shared=True))
    module, optimizer = build(expert_fsdp, WITH_SGD, meshes, model)
    replayed_step.prefetch(module)
    own = [data.shard({"input_ids": batch["input_ids"].to(devices.device())}, dist.get_rank(),
                      TRACED) for batch in data.lm_batches(2, SEQUENCES * TRACED, CONTEXT)]
    return replayed_step.record_events(module, optimizer, own)
