"""Exercise 0.4: a mean of losses that needs a fix."""

from collections.abc import Callable

from labs.checks.numbers import Cause, judge_number, require_number
from labs.checks.on_ranks import WORLD_SIZES
from labs.checks.verdicts import Wrong, check, kind_of
from labs.start_here import recorded_collectives
from labs.start_here.recorded_collectives import RETURNS_NONE
from labs.words import listed

LOSSES = (5, 2, 3, 4)  # batches of each rank in check 0.4; another order follows
AGREE = "Agree on the number of steps first: a collective can take a minimum."


@check("0.4", hints=RETURNS_NONE | {"deadlock": AGREE, "no_progress": AGREE, "IndexError": AGREE})
def check_mean_losses(mean_losses: Callable):
    """Ranks with different numbers of batches must all stop after the shortest rank's last, and
    know how many batches that leaves."""
    for ranks in WORLD_SIZES:
        # The shortest rank comes early, late, or nowhere: catches a rank that decides for all.
        for lengths in (LOSSES[:ranks], LOSSES[:ranks][::-1], (3,) * ranks):
            tried = recorded_collectives.run_answer(
                recorded_collectives.try_losses, mean_losses, lengths, ranks=ranks)
            losses = [own for *_, own in tried]
            for rank, (means, *_) in enumerate(tried):
                _require_means(rank, means, losses)
            for rank, (_, dropped, _) in enumerate(tried):
                _require_dropped(rank, dropped, losses)
    return ("2, 3 and 4 ranks with unequal batches stop together, with the right means, and know "
            "how many batches they drop")


def _require_means(rank, means, losses):
    ranks, steps = len(losses), min(map(len, losses))
    where = f"rank {rank} of {ranks}"
    one_each = ("Return two things: a list with one mean for each step, and the number of dropped "
                "batches.")
    if not isinstance(means, list):
        raise Wrong(f"{where} returned {kind_of(means)}, not a list", one_each, code="wrong_type")
    if len(means) != steps:
        raise Wrong(f"{where} returned {len(means)} means; the shortest rank has {steps} batches",
                    AGREE, code="wrong_count")
    for step in range(steps):
        each = [own[step] for own in losses]
        what = f"{where}, step {step}"
        causes = [Cause("not_summed", each[rank],
                        "the rank's own loss, nothing came from the others"),
                  Cause("sum_not_mean", sum(each), f"the SUM over ranks, {ranks}x the mean")]
        judge_number(require_number(means[step], what, one_each), sum(each) / ranks, causes, what,
                     hint="Sum over ranks, then divide by the world size.",
                     source="the mean over ranks is", rel_tol=0, abs_tol=1e-4)


def _require_dropped(rank, dropped, losses):
    """All ranks know the number, of all ranks: catches a rank's own batches, which need no
    collective."""
    lengths = list(map(len, losses))
    left = [length - min(lengths) for length in lengths]
    what = f"rank {rank} of {len(losses)}, which have {listed(list(map(str, lengths)))} batches"
    causes = [Cause("not_summed", left[rank], "the batches that this rank drops",
                    "Sum over ranks: the same number on each."),
              Cause("kept_not_dropped", min(lengths) * len(lengths),
                    "the batches that are trained on"),
              Cause("all_batches_counted", sum(lengths), "all batches, also those trained on"),
              Cause("longest_rank_only", max(left), "what the longest rank drops"),
              Cause("averaged", sum(left) / len(left), "the MEAN over ranks of what each drops",
                    "Sum over ranks, and do not divide.")]
    judge_number(require_number(dropped, what), sum(left), causes, what, "dropped batches",
                 "Each rank has len(losses) batches and takes the same number of steps.")
