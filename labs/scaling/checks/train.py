"""Check of exercise 6.1: train.py, started on ranks as torchrun does it."""

from collections.abc import Iterator
from pathlib import Path

from labs.exercises.job_end import judge_failed_job, judge_left
from labs.exercises.verdicts import Verdict, Wrong, check
from labs.scaling.checks import train_samples, train_updates
from labs.scaling.runs import forked
from labs.scaling.runs.commands import waiting_exercise
from labs.words import listed, named_ranks
from labs.workers.progress import status

NUMBERS = {"epochs": 2, "batch": 3, "layers": 1, "hidden": 16, "seed": 3}
# Samples: 2 ranks draw 4 batches of 3 an epoch. 28 do not divide by 3 ranks, and without a sampler
# that repeats or drops some, one rank has a batch more than the others.
EVEN, UNEVEN = 24, 28
FAILING_RANK = 1
_HINTS = {
    "is not defined": "Is each name that you use made above its use, or imported?",
    "Default process group has not been initialized": "join_group() comes before the model is "
                                                      "wrapped.",
    "mixed torch.Tensor and DTensor": "fully_shard changes the parameters: make the optimizer from "
                                      "the wrapped module's.",
    "does not require grad": "loss.backward() needs the loss of the model's forward, not of "
                             "loss.item()."}


@check("6.1", _HINTS)
def check_train(script: str = "train.py"):
    """On 2 ranks, on 3 with samples that do not divide, and with FSDP, train.py must draw each
    sample once an epoch in another order each time, and train as one process does on all ranks'
    batches together; where a rank raises, the job must fail."""
    path = Path(script)
    if not script or not path.is_file():
        return Verdict("6.1", None, f"waits for the file {script}: run the cell that writes it")
    if number := waiting_exercise(path):
        raise NotImplementedError(f"Exercise {number}")
    for what, samples, ranks, strategy in (
            ("2 ranks", EVEN, 2, "ddp"), ("3 ranks", UNEVEN, 3, "ddp"),
            ("2 ranks with --strategy fsdp", EVEN, 2, "fsdp")):
        with status(what):
            _judge(_run(path, samples, ranks, strategy), what, samples, strategy)
    with status("2 ranks, of which one fails"):
        _judge_failure(_run(path, EVEN, 2, "ddp", FAILING_RANK))
    return ("on 2 and 3 ranks each sample is drawn once an epoch, in another order each time; "
            "losses, learning rates and parameters are the reference's, with DDP and with FSDP; "
            "when a rank fails, the job fails")


def _run(path, samples, ranks, strategy, failing_rank=None) -> forked.Run:
    numbers = {"samples": samples, **NUMBERS}
    options = [word for name, value in numbers.items() for word in (f"--{name}", value)]
    return forked.run(path, (*options, "--strategy", strategy), ranks, failing_rank)


def _judge(run, what, samples, strategy):
    when = f"{what}, {samples} samples"
    _judge_end(run, when)
    for rank, record in enumerate(run.records):
        if record is None or not record.steps:
            raise Wrong(f"{when}: rank {rank} ended without an optimizer step",
                        "Each rank trains: only what is printed and written is rank 0's alone.")
    drawn = train_samples.judge(run, when, samples, NUMBERS)
    train_updates.judge(run, when, drawn, NUMBERS, strategy)
    _judge_rank_0(run, when)


def _judge_end(run, when):
    """Holds a run to its end: by itself, with exit code 0, and without processes left."""
    if run.code is None:
        raise Wrong(f"{when}: not done after {run.seconds:.0f} s, and nothing moved: "
                    + "; ".join(_where(run)),
                    "All ranks call the same collectives equally often: with the same number of "
                    "batches, and no collective in `if rank == 0`.")
    if run.code:
        rank, record = _first_failure(run)
        if record is None or record.error is None:
            raise Wrong(f"{when}: rank {rank} ended with exit code {run.codes[rank]}"
                        + _last_line(run.output[rank]))
        kind, message, line = record.error
        if kind == "NotImplementedError" and message.startswith("Exercise"):
            raise NotImplementedError(message)
        raise Wrong(f"{when}: rank {rank}, line {line} of train.py: {kind}: {message}")
    judge_left(run, when, "job")


def _where(run) -> Iterator[str]:
    for rank, code in enumerate(run.codes):
        batches = f"rank {rank} had trained on {run.batches[rank]} batches and "
        # A rank that was stopped has the code of the signal.
        yield batches + (f"waited in {run.waiting[rank] or 'no collective'}"
                         if code is None or code < 0 else "ended")


def _first_failure(run):
    """(rank, record) of the rank that failed by itself; others lost their connection to it."""
    failed = [rank for rank, code in enumerate(run.codes) if code]
    alone = [rank for rank in failed if run.records[rank] and run.records[rank].error
             and "onnection" not in run.records[rank].error[1]]
    rank = (alone or failed)[0]
    return rank, run.records[rank]


def _last_line(output) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return f": {lines[-1].strip()[:200]}" if lines else ""


def _judge_rank_0(run, when):
    """Holds a run to one writer: with all ranks in one file, whoever is last wins."""
    writers = [rank for rank, record in enumerate(run.records)
               if run.metrics_path in record.written]
    if writers != [0]:
        who = f"{named_ranks(writers)} wrote" if writers else "no rank wrote"
        raise Wrong(f"{when}: {who} the file of --metrics, and it must be rank 0 alone",
                    "dist.get_rank() says which rank this is: LOCAL_RANK is 0 once on each host.")
    speakers = [rank for rank, output in enumerate(run.output) if rank and _printed(output)]
    if speakers:
        raise Wrong(f"{when}: {named_ranks(speakers)} printed too: "
                    f"{_printed(run.output[speakers[0]])[0][:80]!r}", "Print on rank 0 alone.")
    _judge_metrics(run, when)


def _printed(output) -> list[str]:
    """Lines that are no library's warning."""
    return [line for line in output.splitlines() if line.strip() and "Warning" not in line
            and "warn" not in line and not line.startswith(("[", " "))]


def _judge_metrics(run, when):
    steps = run.metrics.get("steps") if isinstance(run.metrics, dict) else None
    if not isinstance(steps, list) or run.metrics.get("ranks") != run.ranks:
        raise Wrong(f"{when}: the file of --metrics is not JSON of "
                    f'{{"ranks": {run.ranks}, "steps": [...]}}')
    taken = len(run.records[0].steps)
    if len(steps) != taken:
        raise Wrong(f"{when}: the file of --metrics has {len(steps)} steps, and there were {taken}")
    for number, step in enumerate(steps):
        _judge_metric(run, when, number, step)


def _judge_metric(run, when, number, step):
    names = ("loss", "learning_rate", "tokens", "seconds")
    missing = [name for name in names if not isinstance(step, dict)
               or not isinstance(step.get(name), int | float)]
    if missing:
        raise Wrong(f"{when}, step {number}: the file of --metrics has no number for "
                    f"{listed(missing)}", f"Each step is a dict with {listed(names)}.")
    train_updates.judge_metric(run, f"{when}, step {number}", number, step)


def _judge_failure(run):
    hint = "Let an exception end the script, or raise it again."
    judge_failed_job(run, FAILING_RANK, "job", hint, "; ".join(_where(run)), hint)
    # The job may have failed only because another rank lost its connection to this one.
    if run.codes[FAILING_RANK] == 0:
        raise Wrong(f"rank {FAILING_RANK} of {run.ranks} raised an exception, and its exit code "
                    "was 0: another rank's failure ended the job", hint)
