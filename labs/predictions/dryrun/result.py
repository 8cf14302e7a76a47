"""What a dry run found, as numbers and as a table."""

from dataclasses import dataclass, field

from labs.predictions.dryrun.jobs import DryRunJob
from labs.training.memory_categories import GB, NAMES, Memory
from labs.words import listed

MB = 10**6


@dataclass(frozen=True)
class Collective:
    """What one kind of collective does in one step of one rank: calls, and logical bytes, counted
    as labs.meters.traffic counts them."""

    kind: str
    calls: int
    bytes: int


@dataclass(frozen=True, repr=False)
class DryRun:
    """One rank of a job. All in bytes.

    at: "build", "forward", "backward", "step" -> Memory held when that phase ends; "peak" ->
    Memory at the highest moment of a step (the second: the first makes the optimizer's state).
    peaks: phase -> Memory at its highest moment; "build" holds the full model where every rank
    builds it before sharding. collectives: per step. layers: of the model; traced: how many layers
    were traced, fewer where the short cut was taken; note: why it was taken or not.
    untried: operator -> bytes of its largest call's tensors, for operators that may take scratch
    space of an unknown size: where there are any, the numbers are not exact.
    """

    job: DryRunJob
    at: dict[str, Memory]
    peaks: dict[str, Memory]
    collectives: list[Collective]
    layers: int
    traced: int
    note: str
    seconds: float
    untried: dict[str, int] = field(default_factory=dict)

    @property
    def peak(self) -> Memory:
        """Memory at the highest moment of a step."""
        return self.at["peak"]

    def __repr__(self):
        unit, name = (GB, "GB") if self.peak.total >= GB else (MB, "MB")
        lines = [_title(self.job), _row("", [*NAMES, "total"], f"{name} held")]
        for phase, held in self.at.items():
            cells = [f"{value / unit:,.3f}" for value in [*held.by_name().values(), held.total]]
            lines.append(_row(phase, cells, "at the peak" if phase == "peak" else f"after {phase}"))
        lines += [f"{c.calls} {c.kind} per step, {c.bytes / unit:,.3f} {name}"
                  for c in self.collectives]
        return "\n".join([*lines, *self._not_exact(), f"{self.note}; {self.seconds:.1f} s"])

    def _not_exact(self) -> list[str]:
        if not self.untried:
            return []
        named = listed(f"{name} ({size / MB:,.1f} MB)" for name, size in self.untried.items())
        return [f"not exact: the scratch space of {named} is not counted; the operator was too "
                "large to try here, or failed"]


def _row(_, cells, name) -> str:
    return f"{name:16}" + "".join(f"{cell:>17}" for cell in cells)


def _title(job) -> str:
    model = getattr(job.model, "model_type", None) or getattr(job.model, "__name__", "model")
    strategy = getattr(job.strategy, "__name__", job.strategy)
    return (f"{model}, {strategy} on {job.ranks} ranks, {job.batch} × {job.sequence} tokens per "
            f"rank, {job.precision}, checkpointing {job.checkpointing}")
