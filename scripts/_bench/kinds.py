"""The dry run against the allocator's events on jobs of many kinds: other models, optimizers and
loops, options of DDP and FSDP2. What it refuses is told with its reason."""

import statistics

from _bench import memory_events
from _bench.memory_kinds import KINDS
from _bench.progress import done, say
from labs.predictions.dryrun import dry_run
from labs.predictions.dryrun.jobs import DryRunJob


def run(arguments) -> dict:
    """runs: of each job "predicted_bytes", "measured_bytes" and "off_pct", or why it was refused or
    does not run; mean_pct and worst_pct over what was predicted."""
    names = [name for name in KINDS if not arguments.only
             or any(part.lower() in name.lower() for part in arguments.only)]
    runs = []
    for number, name in enumerate(names, 1):
        say(f"{number} of {len(names)}: {name}")
        runs.append({"job": name, **compared(KINDS[name])})
    done()
    off = [abs(run["off_pct"]) for run in runs if "off_pct" in run]
    return {"runs": runs, "predicted": len(off), "mean_pct": statistics.mean(off) if off else None,
            "worst_pct": max(off, default=None)}


def compared(job: DryRunJob) -> dict:
    """One job's row."""
    found = {}
    try:
        found["predicted_bytes"] = predicted(job)
    except (RuntimeError, ValueError) as error:
        found["refused"] = str(error)
    try:
        found["measured_bytes"] = memory_events.on_ranks(job)
    except Exception as error:  # whatever a rank raises
        found["does_not_run"] = str(error).strip().splitlines()[0]
    if "predicted_bytes" in found and "measured_bytes" in found:
        found["off_pct"] = 100 * (found["predicted_bytes"] / found["measured_bytes"] - 1)
    return found


def predicted(job: DryRunJob) -> int:
    """Bytes at the peak of a dry run."""
    return dry_run(job.model, ranks=job.ranks, strategy=job.strategy, batch=job.batch,
                   sequence=job.sequence, precision=job.precision, loop=job.loop,
                   checkpointing=job.checkpointing, optimizer=job.optimizer, inputs=job.inputs,
                   **job.options).peak.total


def table(result) -> str:
    """The result for a terminal."""
    lines = [f"{run['job']:40s}{run.get('predicted_bytes', '-'):>12}"
             f"{run.get('measured_bytes', '-'):>12}   {_verdict(run)}" for run in result["runs"]]
    if result["predicted"]:
        lines.append(f"mean {result['mean_pct']:.4f} %, worst {result['worst_pct']:.4f} % of "
                     f"{result['predicted']} jobs")
    return "\n".join(lines)


def _verdict(run) -> str:
    if "off_pct" in run:
        return f"{run['off_pct']:+.4f} %"
    return run.get("refused") or f"does not run: {run['does_not_run']}"
