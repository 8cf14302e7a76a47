"""Check of exercise 6.1: train.py, started on ranks as torchrun does it."""

from labs.exercises.verdicts import check
from labs.scaling.checks import drawn_samples, script_runs, train_updates
from labs.scaling.runs import forked
from labs.scaling.runs.expected import CONTEXT
from labs.training import data
from labs.workers.progress import status

NUMBERS = {"epochs": 2, "batch": 3, "layers": 1, "hidden": 16, "seed": 3}
# Samples: 2 ranks draw 4 batches of 3 an epoch. 28 do not divide by 3 ranks, and without a sampler
# that repeats or drops some, one rank has a batch more than the others.
EVEN, UNEVEN = 24, 28
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
    if waits := script_runs.waits_for("6.1", script):
        return waits
    for what, samples, ranks, strategy in (
            ("2 ranks", EVEN, 2, "ddp"), ("3 ranks", UNEVEN, 3, "ddp"),
            ("2 ranks with --strategy fsdp", EVEN, 2, "fsdp")):
        with status(what):
            _judge(_run(script, samples, ranks, strategy), what, samples, strategy)
    with status("2 ranks, of which one fails"):
        script_runs.judge_failure(_run(script, EVEN, 2, "ddp", script_runs.FAILING_RANK))
    return ("on 2 and 3 ranks each sample is drawn once an epoch, in another order each time; "
            "losses, learning rates and parameters are the reference's, with DDP and with FSDP; "
            "when a rank fails, the job fails")


def _run(script, samples, ranks, strategy, failing_rank=None) -> forked.Run:
    numbers = {"samples": samples, **NUMBERS}
    return forked.run(script, (*forked.options(numbers), "--strategy", strategy), ranks,
                      failing_rank)


def _judge(run, what, samples, strategy):
    when = f"{what}, {samples} samples"
    script_runs.judge_end(run, when)
    rows = data.windows(samples, CONTEXT, NUMBERS["seed"])[:, :-1]
    drawn_samples.judge(run, when, rows, NUMBERS["epochs"], NUMBERS["batch"])
    train_updates.judge(run, when, NUMBERS, strategy)
    script_runs.judge_rank_0(run, when, ("loss", "learning_rate", "tokens", "seconds"))
    for number, step in enumerate(run.metrics["steps"]):
        train_updates.judge_metric(run, f"{when}, step {number}", number, step)
