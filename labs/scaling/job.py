"""Exercise 6.15: job.py, written from nothing, on ranks as torchrun starts them: its samples, its
updates, and what it shards."""

import math
from collections.abc import Callable, Iterator

import torch

from labs.checks.numbers import Cause, judge_number
from labs.checks.scripts import drawn_samples, forked, run_end
from labs.checks.scripts.commands import CommandResult
from labs.checks.scripts.expected_training import Tensors
from labs.checks.scripts.files import waits_for
from labs.checks.scripts.forked import Run
from labs.checks.scripts.probe import RankRecord
from labs.checks.verdicts import Wrong, check, shows
from labs.pictures.tables import Table
from labs.scaling.expected_job import (
    Drawn,
    ExpectedJob,
    ExpectedStep,
    clipped,
    norm_of,
    train_job_on,
)
from labs.scaling.job_shards import judge_model, judge_shards
from labs.scaling.ragged import answer_samples
from labs.scaling.train import metrics_table
from labs.workers.launcher import launch
from labs.workers.programs import FAILING_RANK
from labs.workers.progress import status

# Gradients have norms of 1 to 4 here: every step is clipped on 2 ranks, none on 4. Each option is
# another one than by default in one run at least.
ON_2 = {"samples": 24, "epochs": 2, "layers": 2, "hidden": 16, "batch": 2, "accumulate": 2,
        "replicas": 1, "clip": 0.5, "seed": 3}
ON_4 = {"samples": 24, "epochs": 3, "layers": 3, "hidden": 16, "batch": 1, "accumulate": 3,
        "replicas": 2, "clip": 100.0, "seed": 5}
# What the table above the exercise says, and the file that is written without --metrics.
DEFAULTS = {"samples": 48, "epochs": 2, "layers": 2, "hidden": 64, "batch": 2, "accumulate": 3,
            "replicas": 1, "clip": 1.0, "seed": 0}
METRICS = "job.json"
_HINTS = {
    "is not defined": "Is each name that you use made above its use, or imported?",
    "Default process group has not been initialized": "dist.init_process_group() comes before the "
                                                      "mesh, the sampler and fully_shard.",
    "unrecognized arguments": "The table above the exercise lists all options.",
    "has no attribute 'full_tensor'": "The norm of sharded gradients is a DTensor. Have the "
                                      "parameters gradients when it is computed, and shards?",
    "PREMUL_SUM": "gloo cannot multiply while it sums: multiply the loss by the number of ranks.",
    "mixed torch.Tensor and DTensor": "fully_shard changes the parameters: make the optimizer from "
                                      "the sharded module's. The norm of sharded gradients is a "
                                      "DTensor too: .full_tensor() is the number."}


@check("6.15", _HINTS)
def check_job(script: str = "job.py"):
    """With FSDP on 2 ranks and HSDP on 2 × 2, job.py must hold shards alone, draw each sample once
    an epoch, and give the optimizer the gradients that one process has on all micro-batches of all
    ranks, clipped by the norm of all of them; so it must without options, by its defaults; where a
    rank raises, the job must fail."""
    if waits := waits_for("6.15", script):
        return waits
    runs = []
    for what, numbers, ranks in (("2 ranks", ON_2, 2), ("4 ranks, --replicas 2", ON_4, 4)):
        with status(what):
            runs.append((_run(script, numbers, ranks), numbers))
            _judge(runs[-1][0], what, numbers)
    _judge_seeds(*runs)
    with status("2 ranks, without options"):
        run = forked.run(script, (), 2, option=None, written=METRICS)
        _judge(run, "2 ranks, without options, so with the table's defaults", DEFAULTS)
    with status("2 ranks, of which one fails"):
        run_end.judge_failure(_run(script, ON_2, 2, FAILING_RANK))
    return ("a rank of 2 stores half of the parameters, and so does one of 2 × 2; each sample is "
            "drawn once an epoch; losses, norms and clipped gradients are the reference's in every "
            "step, with options and with the defaults; when a rank fails, the job fails")


def _run(script, numbers, ranks, failing_rank=None) -> forked.Run:
    return forked.run(script, forked.options(numbers), ranks, failing_rank)


def _judge(run, when, numbers):
    run_end.judge_end(run, when)
    rows = _rows(numbers)
    drawn_samples.judge(run, when, rows, numbers["epochs"], numbers["batch"])
    _judge_parts(run, when, numbers)
    of_ranks = [drawn_samples.indices(run, rank, rows) for rank in range(run.ranks)]
    drawn: Drawn = [list(parts) for parts in zip(*of_ranks, strict=True)]
    [expected] = launch(train_job_on, drawn, numbers["samples"], numbers["layers"],
                        numbers["hidden"], numbers["seed"], numbers["clip"], ranks=1, quiet=True)
    judge_model(run, when, expected, numbers)
    # What is sharded is judged before the updates: a job without FSDP may train as the reference
    # does.
    judge_shards(run, when, expected.nbytes, numbers["replicas"])
    judge_updates(run, when, expected, numbers["clip"])
    run_end.judge_metrics(run, when, ("loss", "tokens", "norm"))
    judge_metrics(run, when, expected, numbers)


def _rows(numbers) -> torch.Tensor:
    """The tokens of the samples, (samples, sequence)."""
    samples = answer_samples(numbers["samples"], numbers["seed"])
    return torch.stack([sample["input_ids"] for sample in samples])


def _judge_seeds(*runs: tuple[forked.Run, dict]) -> None:
    """As in train.py, the seed of the job is the shuffle's: the ranks' samples of the first epoch
    in turn are its order, on 2 ranks and on 4."""
    orders = []
    for run, numbers in runs:
        of_ranks = [[index for step in drawn_samples.indices(run, rank, _rows(numbers))
                     for part in step for index in part] for rank in range(run.ranks)]
        drawn = [index for same in zip(*of_ranks, strict=True) for index in same]
        orders.append(drawn[:numbers["samples"]])
    if orders[0] == orders[1]:
        seeds = " and with --seed ".join(str(numbers["seed"]) for _, numbers in runs)
        raise Wrong(f"with --seed {seeds} the samples are drawn in the same order",
                    "options.seed goes to the sampler, too: DistributedSampler(rows, "
                    "seed=options.seed).", code="seed_ignored")


def _judge_parts(run, when, numbers):
    """Several micro-batches make one step: with a step after each, the batch is another one."""
    for rank, record in enumerate(run.records):
        for number, step in enumerate(record.steps):
            sizes = [len(batch.rows) for batch in step.batches]
            if sizes != [numbers["batch"]] * numbers["accumulate"]:
                raise Wrong(f"{when}: rank {rank}, step {number}: the micro-batches before the "
                            f"optimizer's step have {sizes} samples; --accumulate "
                            f"{numbers['accumulate']} --batch {numbers['batch']} asks for "
                            f"{[numbers['batch']] * numbers['accumulate']}",
                            "The gradients of several backward passes add up until the optimizer "
                            "steps.", code="wrong_batch")


GRADIENT = 1e-3  # of the norm: float32 sums in another order, over some steps of AdamW
REPORTED = 1e-4  # relative
_TOKENS = ("Add up the answer tokens of all micro-batches, reduce the sum over the ranks, and "
           "divide each loss by it. FSDP divides by the number of ranks once more.")
_UPDATE = ("All gradients before this step were right: is the optimizer AdamW, with a learning "
           "rate of 1e-3, and are the gradients zero after each step?")
_CLIP = ("The norm is of all gradients of all ranks: clip_grad_norm_ of the sharded module's "
         "parameters, after the last backward and before the optimizer's step.")


def judge_updates(run: Run, when: str, expected: ExpectedJob, clip: float) -> None:
    """Raises Wrong unless in every step the optimizer got the reference's gradients, clipped by the
    norm of all of them together."""
    for number, step in enumerate(expected.steps):
        # Invariant: the optimizer gets the gradient of the mean over all answer tokens, clipped by
        # the norm over all ranks. A rank's own norm is smaller than that, so each rank would clip
        # less.
        want = clipped(step.gradients, clip)
        for rank, record in enumerate(run.records):
            where = f"{when}: rank {rank}, step {number}"
            missing = [name for name in want if name not in record.steps[number].gradients]
            if missing:
                raise Wrong(f"{where}: {missing[0]!r} has no gradient when the optimizer steps",
                            "A shard gets its gradient in a backward that synchronizes.",
                            code="gradient_missing")
            if (off := _off(record, number, want)) > GRADIENT:
                why, hint = _cause(run, number, expected, clip)
                raise Wrong(f"{where}: the gradients that the optimizer gets are "
                            + (why or f"off by {off:.0%} of the reference's norm"), hint,
                            code="wrong_gradient")


def own_pieces(record: RankRecord, tensors: Tensors) -> Tensors:
    """What a rank holds of full tensors, by the shards that it held of the parameters."""
    found = {}
    for name, tensor in tensors.items():
        dim, piece, pieces = record.shards.get(name, (0, 0, 1))
        chunks = tensor.chunk(pieces, dim)
        # torch cuts off fewer pieces where a dimension is shorter than their number
        found[name] = chunks[piece] if piece < len(chunks) else tensor.narrow(dim, 0, 0)
    return found


def _off(record, number, tensors) -> float:
    """How far a rank's gradients are from its pieces of these, relative to the norm of all."""
    found, want = record.steps[number].gradients, own_pieces(record, tensors)
    if any(found[name].shape != want[name].shape for name in want):
        return math.inf
    away = norm_of({name: found[name] - want[name] for name in want})
    return away / norm_of(tensors) if math.isfinite(away) else math.inf


def _cause(run, number, expected, clip) -> tuple[str, str]:
    """The mistake that explains every rank's gradients, and what to do; empty without one."""
    for what, hint, of_rank in _mistakes(expected, number, clip):
        if all(_off(record, number, of_rank(record)) <= GRADIENT for record in run.records):
            return what, hint
    factor = _factor(run, number, expected.steps[number].gradients)
    if factor:
        return (f"the reference's before clipping times {factor:.3g}",
                f"{_CLIP} options.clip is the maximum.")
    return "", _UPDATE if number else _TOKENS


def _factor(run, number, raw) -> float | None:
    """By what all ranks' gradients are multiples of the reference's; None if they are not."""
    pieces = [(record.steps[number].gradients, own_pieces(record, raw)) for record in run.records]
    products = sum((found[name] * own[name]).sum().item() for found, own in pieces for name in own)
    factor = products / sum(norm_of(own) ** 2 for _, own in pieces)
    scaled = {name: gradient * factor for name, gradient in raw.items()}
    if factor > 0 and all(_off(record, number, scaled) <= GRADIENT for record in run.records):
        return factor
    return None


def _mistakes(expected, number, clip) -> Iterator[tuple[str, str, Callable[[RankRecord], Tensors]]]:
    """(what it is, a hint, the rank's record -> full gradients) of common mistakes."""
    raw = expected.steps[number].gradients
    most = norm_of(raw)
    yield "the reference's before clipping", _CLIP, lambda record: raw
    yield ("clipped by each rank's own norm, of its shards alone", _CLIP,
           lambda record: clipped(raw, clip, norm_of(own_pieces(record, raw))))
    yield (f"scaled to a norm of {clip:g}, and theirs was only {most:.3g}", _CLIP,
           lambda record: {name: gradient * (clip / most) for name, gradient in raw.items()})
    # The mistakes of the loss were computed for the first step alone: after a wrong step the
    # parameters, and so all later gradients, are others.
    if number:
        before = clipped(expected.steps[number - 1].gradients, clip)
        added = clipped({name: raw[name] + before[name] for name in raw}, clip)
        yield ("those of this step and of the step before together", "optimizer.zero_grad() after "
               "each step.", lambda record: added)
        return
    for what, step in expected.mistakes.items():
        wrong = clipped(step.gradients, clip)
        yield f"those of {what}, clipped", _TOKENS, lambda record, wrong=wrong: wrong


def judge_metrics(run: Run, when: str, expected: ExpectedJob, numbers: dict[str, float]) -> None:
    """Raises Wrong unless loss, tokens and norm of every step are what they were."""
    for number, (step, want) in enumerate(zip(run.metrics["steps"], expected.steps, strict=True)):
        mistakes = expected.mistakes if number == 0 else {}
        where = f"{when}, step {number}, in the file of --metrics"
        judge_number(step["tokens"], sum(want.tokens),
                     [Cause("rank_0_own", want.tokens[0], "rank 0's own", "")], f"{where}: tokens",
                     hint="Count the labels that are not -100, over all micro-batches and ranks.")
        judge_number(step["loss"], want.loss,
                     [Cause("wrong_weights", each.loss, what) for what, each in mistakes.items()],
                     f"{where}: loss", hint="Sum each micro-batch's share, then over the ranks.",
                     source="the mean over all answer tokens is", rel_tol=REPORTED)
        judge_number(step["norm"], want.norm, list(_norms(run, want, mistakes, numbers)),
                     f"{where}: norm", hint=_CLIP, rel_tol=REPORTED,
                     source="before clipping, of all gradients, it is")


def _norms(run, want: ExpectedStep, mistakes, numbers) -> Iterator[Cause]:
    own = norm_of(own_pieces(run.records[0], want.gradients))
    yield Cause("norm_of_one_rank", own, "that of rank 0's shards alone",
                "Of a DTensor, .full_tensor() is the number of all.")
    yield Cause("norm_after_clipping", numbers["clip"], "the norm after clipping",
                "clip_grad_norm_ returns the one before.")
    yield Cause("mean_twice", want.norm / run.ranks, f"the right one divided by {run.ranks}",
                _TOKENS)
    if numbers["replicas"] > 1:
        yield Cause("all_ranks_shards", want.norm * math.sqrt(numbers["replicas"]),
                    "that of all ranks' shards, and each "
                    f"stands in {numbers['replicas']} replicas",
                    "Sum the squares over one replica.")
    for what, step in mistakes.items():
        yield Cause("wrong_weights", step.norm, f"that of {what}", _TOKENS)


@shows("What the job wrote")
def show_job(run: CommandResult, metrics: str = "job.json") -> Table:
    """Returns a table of some of the steps in the JSON file that this run of job.py has written.
    Raises Wrong where it failed or has not written it."""
    return metrics_table(run, metrics, {
        "mean loss": lambda step: f"{step['loss']:.3f}",
        "answer tokens": lambda step: f"{step['tokens']:g}",
        "norm before clipping": lambda step: f"{step['norm']:.2f}"})
