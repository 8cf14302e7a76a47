"""Exercise 6.1: train.py, started on ranks as torchrun does it: its samples, its updates, and what
it reports."""

import math
import re
from dataclasses import dataclass

import torch

from labs.checks.scripts import drawn_samples, forked, run_end, updates
from labs.checks.scripts.commands import CommandResult
from labs.checks.scripts.expected_training import CONTEXT
from labs.checks.scripts.files import read_metrics, waits_for
from labs.checks.scripts.forked import Run
from labs.checks.scripts.updates import far, losses, mean_loss
from labs.checks.student_code import message_of
from labs.checks.verdicts import Wrong, check, shows
from labs.pictures.tables import Table
from labs.training import data
from labs.words import format_distinct
from labs.workers import devices
from labs.workers.programs import FAILING_RANK
from labs.workers.progress import status

EPOCHS, BATCH, HIDDEN = 2, 3, 16  # the batch is not train.py's own default
# Samples: each of 2 ranks draws batches of 3, 3, 3 and 2. 28 do not divide by 3 ranks, and without
# a sampler that repeats or drops some, one rank has a batch more than the others.
EVEN, UNEVEN = 22, 28
_HINTS = {
    "is not defined": "Is each name that you use made above its use, or imported?",
    "Default process group has not been initialized": "join_group() comes before the model is "
                                                      "wrapped.",
    "mixed torch.Tensor and DTensor": "fully_shard changes the parameters: make the optimizer from "
                                      "the wrapped module's.",
    "does not require grad": "loss.backward() needs the loss of the model's forward, not of "
                             "loss.item().",
    "is not JSON serializable": "Of a tensor with one number, .item() is the number.",
    "default process group twice": "join_group() has made the process group.",
    "cannot access local variable": "Is the name set on every way to this line, with --strategy "
                                    "ddp and with fsdp?"}


@dataclass(frozen=True)
class Case:
    """A run of train.py. hosts: as many its ranks believe in."""

    what: str
    ranks: int
    samples: int
    strategy: str = "ddp"
    layers: int = 1
    seed: int = 3
    hosts: int = 1

    @property
    def numbers(self) -> dict[str, int]:
        """The options that are numbers."""
        return {"samples": self.samples, "epochs": EPOCHS, "batch": BATCH, "layers": self.layers,
                "hidden": HIDDEN, "seed": self.seed}

    def run(self, script: str, failing_rank: int | None = None) -> forked.Run:
        """Runs the script on its ranks."""
        # a host's ranks would take the same GPU, by their LOCAL_RANK, as another host's
        hosts = 1 if devices.gpus() else self.hosts
        return forked.run(script, (*forked.options(self.numbers), "--strategy", self.strategy),
                          self.ranks, failing_rank, hosts=hosts)

    def rows(self) -> torch.Tensor:
        """The tokens of its samples."""
        return data.windows(self.samples, CONTEXT, self.seed)[:, :-1]


ON_2, ON_3 = Case("2 ranks", 2, EVEN), Case("3 ranks", 3, UNEVEN)
# Another seed, and a LOCAL_RANK of 0 on both ranks; in two blocks, one left out shows.
WITH_FSDP = Case("2 hosts of 1 rank, --strategy fsdp", 2, EVEN, "fsdp", layers=2, seed=5, hosts=2)


@check("6.1", _HINTS)
def check_train(script: str = "train.py"):
    """On 2 ranks, on 3 with samples that do not divide, and with FSDP, train.py must draw each
    sample once an epoch in another order each time, and train as one process does on all ranks'
    batches together; rank 0 alone reports what all did; where a rank raises, the job must fail."""
    if waits := waits_for("6.1", script):
        return waits
    runs = {}
    for case in (ON_2, ON_3, WITH_FSDP):
        with status(case.what):
            runs[case] = case.run(script)
            _judge(runs[case], case)
    drawn_samples.judge_seeds(*((runs[case], case.rows(), case.seed) for case in (ON_2, WITH_FSDP)))
    with status("2 ranks, of which one fails"):
        run_end.judge_failure(ON_2.run(script, FAILING_RANK))
    return ("on 2 and 3 ranks each sample is drawn once an epoch, in another order each time; "
            "losses, learning rates and parameters are the reference's, with DDP and with FSDP; "
            "when a rank fails, the job fails")


def _judge(run, case):
    when = f"{case.what}, {case.samples} samples"
    run_end.judge_end(run, when)
    drawn_samples.judge(run, when, case.rows(), EPOCHS, BATCH)
    drawn_samples.judge_batches(run, when, EPOCHS, BATCH)
    updates.judge(run, when, case.numbers, case.strategy)
    run_end.judge_metrics(run, when, ("loss", "learning_rate", "tokens", "seconds"))
    judge(run, when)


LATE = 5e-3  # seconds: a reported time may be rounded to hundredths
LEAST = 0.5  # of forward and backward: somebody may leave the optimizer's step out
_NUMBER = re.compile(r"(?<![\d.])-?\d+\.(\d+)(?:e([+-]\d+))?")
_PER_STEP = ("Of this step alone: read time.perf_counter() at its end, subtract what you read at "
             "the end of the step before, and keep the new number for the next one.")


def judge(run: Run, when: str) -> None:
    """Raises Wrong unless what is reported of each step is what all ranks did in it, and rank 0
    printed the last loss."""
    for number, step in enumerate(run.metrics["steps"]):
        _judge_numbers(run, f"{when}, step {number}", number, step)
    _judge_seconds(run, when, [step["seconds"] for step in run.metrics["steps"]])
    _judge_printed(run, when, [step["loss"] for step in run.metrics["steps"]])


def _judge_numbers(run, when, number, step):
    mean, sequences = mean_loss(run, number)
    # Invariant: the reported loss is the mean over the samples of all ranks, not rank 0's own.
    if not math.isnan(mean) and far(step["loss"], mean):
        is_, should_be = format_distinct(step["loss"], mean, digits=5)
        raise Wrong(f"{when}: the reported loss is {is_}"
                    f"{_cause(run, number, step['loss'], mean, sequences)}; the mean over the "
                    f"samples of all ranks is {should_be}", "Each rank sums its losses and counts "
                    "its samples; both are all-reduced before the division.",
                    code="wrong_reported_loss")
    rate = run.records[0].steps[number].learning_rate
    if far(step["learning_rate"] / 1e-3, rate / 1e-3):
        is_, should_be = format_distinct(step["learning_rate"], rate)
        raise Wrong(f"{when}: the reported learning rate is {is_}, the step was taken with "
                    f"{should_be}", "Read it before scheduler.step().", code="wrong_reported_rate")
    # Invariant: tokens are those of all ranks together.
    if step["tokens"] != sequences * CONTEXT:
        own = step["tokens"] * run.ranks == sequences * CONTEXT
        raise Wrong(f"{when}: {step['tokens']:g} tokens are reported{' (one rank)' * own}; all "
                    f"ranks together had {sequences} sequences of {CONTEXT}",
                    "Add up the samples of all ranks; each has windows.shape[1] tokens.",
                    code="wrong_reported_tokens")


def _cause(run, number, loss, mean, sequences) -> str:
    if not far(loss, losses(run.records[0], number)):
        return ": rank 0's own"
    if not far(loss / run.ranks, mean):
        return f": the sum over {run.ranks} ranks"
    if not far(loss / sequences, mean):
        return f": the sum over all {sequences} samples"
    return ""


def _judge_seconds(run, when, seconds):
    """A step's seconds lie between the forward of the step before and that of the step after it,
    wherever in the loop the clock is read: a time since the beginning soon is longer. And they hold
    most of the step's forward and backward."""
    record = run.records[0]
    edges = [record.started, *(step.began for step in record.steps), record.ended]
    for number, (reported, begin, end) in enumerate(zip(seconds, edges, edges[2:], strict=False)):
        if reported > end - begin + LATE:
            raise Wrong(f"{when}, step {number}: {reported:.3g} seconds are reported, and from the "
                        f"step before it to the one after it {end - begin:.3g} passed: they are "
                        "not of this step alone", _PER_STEP, code="wrong_reported_seconds")
    # seconds of forward and backward of all steps
    least = sum(step.stepped - step.began for step in record.steps)
    if not sum(seconds) >= LEAST * least:
        raise Wrong(f"{when}: {sum(seconds):.3g} seconds are reported of all {len(seconds)} steps "
                    f"together; their forward and backward alone took {least:.3g}", _PER_STEP,
                    code="wrong_reported_seconds")


def _judge_printed(run, when, steps):
    """Somebody who watches the job sees how it ends: a number, rounded or not, among other words.
    """
    printed = run.output[0]
    # (number, half a unit of its last printed digit)
    found = [(float(each[0]), 0.5001 * 10 ** (int(each[2] or 0) - len(each[1])))
             for each in _NUMBER.finditer(printed)]
    if any(abs(number - steps[-1]) <= rounding for number, rounding in found):
        return
    said = next((f": the loss of step {step} stands there" for step, loss in enumerate(steps)
                 if any(abs(number - loss) <= rounding for number, rounding in found)),
                "" if printed.strip() else ": nothing")
    raise Wrong(f"{when}: rank 0 did not print the last loss, {steps[-1]:.4f}{said}",
                'print(f"loss {steps[-1][\'loss\']:.3f}") on rank 0.', code="nothing_printed")


@shows("What the ranks wrote")
def show_metrics(run: CommandResult, metrics: str = "metrics.json") -> Table:
    """Returns a table of some of the steps in the JSON file that this run of train.py has written.
    Raises Wrong where it failed or has not written it."""
    return metrics_table(run, metrics, {
        "mean loss": lambda step: f"{step['loss']:.3f}",
        "learning rate": lambda step: f"{step['learning_rate']:.1e}",
        "tokens": lambda step: f"{step['tokens']:g}",
        "ms": lambda step: f"{1e3 * step['seconds']:.1f}",
        "tokens/s": lambda step: f"{step['tokens'] / step['seconds']:,.0f}"})


def metrics_table(run, metrics, columns) -> Table:
    """columns: title -> cell(step)."""
    found = read_metrics(run, metrics, {"ranks": int, "steps": list})
    steps = found["steps"]
    chosen = sorted({round(place * (len(steps) - 1) / 7) for place in range(8)}) if steps else []
    rows = []
    for number in chosen:
        try:
            rows.append((number, *(cell(steps[number]) for cell in columns.values())))
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            raise Wrong(f"step {number} in {metrics} lacks a number that is shown here: "
                        f"{message_of(error)}", code="missing_keys") from None
    return Table(f"{len(steps)} steps on {found['ranks']} ranks", ("step", *columns), rows, left=1)
