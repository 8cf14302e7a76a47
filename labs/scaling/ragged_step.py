"""Exercise 6.2: the mean over all ranks' answer tokens, also over several micro-batches."""

import copy
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labs.checks.guesses import guessed
from labs.checks.numbers import Cause, judge_number
from labs.checks.on_ranks import on_ranks, raise_on_all_ranks
from labs.checks.tolerances import SUMS
from labs.checks.verdicts import Wrong, check, kind_of, shows
from labs.pictures import palette
from labs.pictures.bars import Bar, bars
from labs.pictures.picture import Picture
from labs.scaling.ragged import Shares, answers, count_answers, loss_sum
from labs.training import models
from labs.workers import devices
from labs.workers.launcher import launch

# Of each case: its name, and lengths(rank, part) of the answers of a micro-batch; and their number.
CASES = (
    ("one micro-batch", lambda rank, part: (3 + 9 * rank, 2), 1),
    ("three micro-batches", lambda rank, part: (2 + 7 * part, 5 + 3 * rank), 3),
    ("a micro-batch without answer tokens on rank 0",
     lambda rank, part: (0, 0) if rank == 0 and part == 1 else (4 + part, 9 - rank), 2),
    ("no answer token on the last rank",
     lambda rank, part: (0, 0) if rank == dist.get_world_size() - 1 else (3, 8 + rank), 2))
# Of the picture: tokens of rank 0's and of rank 1's answers, and how many answers a rank has. With
# few answers the gradient depends on their text.
ANSWERS, SEQUENCES = ((16, 16), (12, 20), (8, 24), (4, 28), (2, 30)), 48
_HINT = ("Reduce the number of answer tokens of all micro-batches over the ranks before the first "
         "backward. DDP averages: it divides by the number of ranks once.")


@check("6.2", hints={
    "of type torch.Tensor": "Collectives take tensors: (batch[\"labels\"] != -100).sum() is one, "
    "and the sum of several is one, too.",
    "Expected to have finished reduction": "A rank runs forward and backward for each micro-batch, "
    "also for one without answer tokens: the others wait for its gradients.",
    "the ranks are in different collectives": "Does each rank run backward for each micro-batch, "
    "also for one without answer tokens? The others reduce its gradients then."})
def check_ragged_step(ragged_step):
    """On 2, 3 and 4 ranks: the gradients and the returned loss are those of the mean over all
    answer tokens of all ranks and micro-batches."""
    differences = on_ranks(_try_all, ragged_step)
    return ("gradients and loss are those of the mean over all answer tokens, on 2, 3 and 4 ranks, "
            "with 1 to 3 micro-batches and where a rank has no answer token "
            f"(max difference {max(differences):.0e})")


def micro_batches(lengths: Callable, parts: int, rank: int) -> list[dict]:
    """What a rank trains on in one step."""
    return [answers(lengths(rank, part), seed=10 * rank + part) for part in range(parts)]


def _shares(model, lengths, parts) -> Shares:
    """Of every rank's every micro-batch."""
    return Shares(model, [micro_batches(lengths, parts, rank)
                          for rank in range(dist.get_world_size())])


def small_model() -> nn.Module:
    """A GPT-2 in float64, in which a wrong weight cannot hide behind rounding."""
    model = models.gpt2(layers=1, hidden=16, context=64, seed=1).double()
    return models.move_to_rank(model)


def _try_all(ragged_step) -> float:
    """On a rank: the largest relative difference of a gradient."""
    differences = []
    for name, lengths, parts in CASES:
        model = small_model()
        # A single process computes the batches of all ranks; each rank runs only its own through
        # DDP.
        reference = _shares(copy.deepcopy(model), lengths, parts)
        module = DistributedDataParallel(model)
        loss = ragged_step(module, micro_batches(lengths, parts, dist.get_rank()))
        differences.append(raise_on_all_ranks(_judge, model, loss, reference, name))
    return max(differences)


def _judge(model, loss, reference, name) -> float:
    rank = dist.get_rank()
    where = f"{reference.ranks} ranks, {name}: rank {rank}"
    # Invariant: each answer token of all ranks and micro-batches has the same weight. A mean of the
    # ranks' means gives a token of a short answer more weight than one of a long answer.
    want_loss, want = reference.step(lambda r, p: 1 / reference.total)
    found = _gradient(model, where)
    mistakes = reference.mistakes()
    difference = _distance(found, want)
    if not difference <= SUMS:
        why = next((sentence for sentence, weight in mistakes
                    if _distance(found, reference.step(weight)[1]) <= SUMS), "")
        _, alone = reference.step(lambda r, p: (r == rank) / max(1, sum(reference.counts[r])))
        if not why and _distance(found, alone) <= SUMS:
            why = "this rank's own, averaged with no other's"
        _, last = reference.step(lambda r, p: (p == reference.parts - 1) / reference.total)
        if not why and _distance(found, last) <= SUMS:
            raise Wrong(f"{where}: the gradient is that of the last micro-batch alone",
                        "Each backward adds to what lies in the gradients: nothing sets them to "
                        "zero in between.", code="last_micro_batch_only")
        raise Wrong(f"{where}: the gradient is "
                    + (why or f"off by {difference:.0%} of the reference's"), _HINT,
                    code="wrong_gradient")
    if loss is None:
        raise Wrong(f"{where}: it returned {kind_of(loss)}, not the mean loss", "Return the loss "
                    "over all ranks, as it would be logged.", code="wrong_type")
    causes = [Cause("wrong_weights", reference.step(weight)[0], sentence)
              for sentence, weight in mistakes]
    own = sum(reference.step(lambda r, p, part=part: float(r == rank and p == part))[0]
              for part in range(reference.parts))
    causes.append(Cause("mean_rank_alone", own / max(1, sum(reference.counts[rank])),
                        "the mean of this rank alone", ""))
    causes.append(Cause("rank_share", own / reference.total, "this rank's share of it", ""))
    if isinstance(loss, torch.Tensor):
        loss = loss.detach()
    judge_number(loss, want_loss, causes, f"{where}, the loss", hint="Sum the losses over the "
                 "ranks before you divide.", source="the mean over all answer tokens is",
                 rel_tol=SUMS)
    return difference


def _gradient(model, where) -> torch.Tensor:
    missing = [name for name, p in model.named_parameters() if p.grad is None]
    if missing:
        raise Wrong(f"{where}: parameter {missing[0]!r} has no gradient", "Differentiate the loss "
                    "with backward(), and leave the gradients in place: the loop steps.",
                    code="gradient_missing")
    found = torch.cat([p.grad.flatten() for p in model.parameters()])
    if not found.isfinite().all():
        raise Wrong(f"{where}: the gradient is not finite", "The mean over no token is 0 / 0. Sum "
                    "the losses, and divide by the number over all ranks.", code="not_finite")
    return found


def _distance(found, want) -> float:
    return ((found - want).norm() / want.norm()).item()


def means_of_means(module: nn.Module, batches: Sequence[dict]) -> None:
    """On a rank: the wrong step, which each rank's own mean leads to."""
    for batch in batches:
        (loss_sum(module, batch) / count_answers(batch) / len(batches)).backward()


def errors_of_means(ragged_step: Callable) -> list[tuple[float, float]]:
    """On one of two ranks: for each pair of ANSWERS, how far the gradients of the mean of means and
    of `ragged_step` are from the reference's, relative to its norm."""
    return [_errors(ragged_step, lambda rank, part, pair=pair: (pair[rank],) * SEQUENCES)
            for pair in ANSWERS]


def _errors(ragged_step, lengths) -> tuple[float, float]:
    reference = _shares(small_model(), lengths, 1)
    want = reference.step(lambda r, p: 1 / reference.total)[1]
    own = micro_batches(lengths, 1, dist.get_rank())
    found = []
    for step in (means_of_means, ragged_step):
        model = small_model()
        step(DistributedDataParallel(model), own)
        gradient = raise_on_all_ranks(_gradient, model, f"2 ranks: rank {dist.get_rank()}")
        found.append(_distance(gradient, want))
    devices.synchronize()
    return tuple(found)


@shows("6.2")
def show_ragged(ragged_step: Callable) -> Picture:
    """Draws how far the mean of two ranks' means is from the right gradient, for answers of more
    and more uneven lengths; the student's `ragged_step` beside it."""
    errors = launch(errors_of_means, ragged_step, ranks=2, quiet=True)[0]
    rows = [Bar(f"mean of means, answers of {first} and {second} tokens", round(100 * wrong, 3),
                guessed=guessed("6.2") if (first, second) == ANSWERS[-1] else None)
            for (first, second), (wrong, _) in zip(ANSWERS, errors, strict=True)]
    rows.append(Bar("yours, the worst of these", round(100 * max(own for _, own in errors), 3),
                    colour=palette.PHASES["forward"]))
    return bars(rows, "%", "relative error of the gradient", lesson=(
        f"The mean of means is up to {max(row.measured for row in rows[:-1]):.3g} % off, yours "
        f"{rows[-1].measured:.3g} %"))
