"""Exercise 6.1: what rank 0 writes of each step, and what it prints."""

import math
import re

from labs.exercises.scripts.forked import Run
from labs.exercises.verdicts import Wrong
from labs.scaling.checks.train_updates import far, losses, mean_loss
from labs.scaling.runs.expected import CONTEXT
from labs.words import format_distinct

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
    least = sum(step.stepped - step.began for step in record.steps)
    if not sum(seconds) >= LEAST * least:
        raise Wrong(f"{when}: {sum(seconds):.3g} seconds are reported of all {len(seconds)} steps "
                    f"together; their forward and backward alone took {least:.3g}", _PER_STEP,
                    code="wrong_reported_seconds")


def _judge_printed(run, when, steps):
    """Somebody who watches the job sees how it ends: a number, rounded or not, among other words.
    """
    printed = run.output[0]
    found = [(float(each[0]), 0.5001 * 10 ** (int(each[2] or 0) - len(each[1])))
             for each in _NUMBER.finditer(printed)]
    if any(abs(number - steps[-1]) <= rounding for number, rounding in found):
        return
    said = next((f": the loss of step {step} stands there" for step, loss in enumerate(steps)
                 if any(abs(number - loss) <= rounding for number, rounding in found)),
                "" if printed.strip() else ": nothing")
    raise Wrong(f"{when}: rank 0 did not print the last loss, {steps[-1]:.4f}{said}",
                'print(f"loss {steps[-1][\'loss\']:.3f}") on rank 0.', code="nothing_printed")
