"""The checks of exercises 0.1 to 0.4, one function for each: real ranks, and what each wrong answer
did in one sentence."""

from collections.abc import Callable, Iterator

import torch

from labs.exercises.numbers import Cause, judge_number, require_number, require_signature
from labs.exercises.on_ranks import WORLD_SIZES
from labs.exercises.verdicts import Wrong, check, kind_of
from labs.start_here import recording
from labs.start_here.return_values import KEEP_TYPE, require_tensor

LOSSES = (5, 2, 3, 4)  # batches of each rank in check 0.4; another order follows
AGREE = "Agree on the number of steps first: a collective can take a minimum."
RETURNS_NONE = {"NoneType": "A collective writes into its tensor and returns None: call it on a "
                            "line of its own, then use the tensor."}
RING_SIZES = (96, 96_000)  # bytes, divisible by 4-byte numbers on 2, 3 and 4 ranks
TO_ALL = "Every rank must get the result: which collective gives it to all?"


@check("0.1", hints=RETURNS_NONE)
def check_mean_over_ranks(mean_over_ranks: Callable):
    """Every rank must hold the mean of all ranks' tensors, and still hold its own tensor."""
    for tried in _tried(mean_over_ranks, recording.tensors_to_average):
        ranks, mean = len(tried), sum(one.own for one in tried) / len(tried)
        # Every rank holds the mean, in its own tensor's shape and dtype: catches a sum, a divisor
        # that is right on one world size only, and a reduce to rank 0.
        for rank, one in enumerate(tried):
            _require_like(rank, ranks, one.result, one.own)
            if not torch.allclose(one.result, mean):
                raise _not_the_mean(rank, ranks, tried)
        # The argument is unchanged: catches all_reduce on `mine` itself.
        for rank, one in enumerate(tried):
            if not torch.equal(one.own, one.after):
                raise Wrong(f"rank {rank} of {ranks}: `mine` was changed, and its owner still "
                            "needs it", "all_reduce writes into its argument: give it a clone.",
                            code="changes_input")
    return "on 2, 3 and 4 ranks, every rank holds the mean and kept its own tensor"


@check("0.2", hints=RETURNS_NONE | {"dtype": KEEP_TYPE})
def check_all_reduce(all_reduce_in_two: Callable):
    """The sum on every rank, by one reduce-scatter and one all-gather of the shards."""
    for tried in _tried(all_reduce_in_two, recording.tensors_to_sum):
        ranks, total = len(tried), sum(one.own for one in tried)
        # Two collectives, the right ones: catches all_reduce itself, and gather-then-sum.
        for rank, one in enumerate(tried):
            _require_two_calls(f"rank {rank} of {ranks}", one.names)
        for rank, one in enumerate(tried):
            # In `mine`'s shape and dtype: the next cell draws whole numbers.
            _require_whole(rank, ranks, one.result, one.own)
            _require_sum(rank, ranks, one, total)
            _require_shards(rank, ranks, one)
    return "one reduce-scatter and one all-gather give all-reduce's sum on 2, 3 and 4 ranks"


@check("0.3")
def check_ring_bytes(ring_bytes: Callable):
    """The formula must give the bytes that a ring of sends and receives was seen to send."""
    require_signature(ring_bytes, ("size", "ranks"))
    for ranks in reversed(WORLD_SIZES):  # on 2 ranks too many formulas agree
        for size in RING_SIZES:
            counted = max(recording.counted_bytes(ranks, size))
            judge_number(ring_bytes(size, ranks), counted, _byte_causes(counted, size, ranks),
                         f"{size:,} bytes on {ranks} ranks", "bytes",
                         "How many steps, and how many bytes leave in each?", source="each sent",
                         rel_tol=1e-6)
    return "your formula equals the bytes counted on rings of 2, 3 and 4 ranks"


@check("0.4", hints=RETURNS_NONE | {"deadlock": AGREE, "no_progress": AGREE, "IndexError": AGREE})
def check_mean_losses(mean_losses: Callable):
    """Ranks with different numbers of batches must all stop after the shortest rank's last."""
    for ranks in WORLD_SIZES:
        # The shortest rank comes early, late, or nowhere: catches a rank that decides for all.
        for lengths in (LOSSES[:ranks], LOSSES[:ranks][::-1], (3,) * ranks):
            tried = recording.run_answer(recording.try_losses, mean_losses, lengths, ranks=ranks)
            for rank, (means, _) in enumerate(tried):
                _require_means(rank, means, [own for _, own in tried])
    return "2, 3 and 4 ranks with unequal batches stop together, with the right means"


def _tried(answer, tensors) -> Iterator[list[recording.Tried]]:
    """What each rank did with its tensor: for each tensor, on each number of ranks."""
    for number in range(recording.TENSORS):
        for ranks in WORLD_SIZES:
            yield recording.run_answer(recording.try_tensor, answer, tensors, number, ranks=ranks)


def _require_like(rank, ranks, result, own):
    where = f"rank {rank} of {ranks}"
    require_tensor(rank, ranks, result)
    if result.shape != own.shape:
        raise Wrong(f"{where} returned shape {list(result.shape)}, its tensor has "
                    f"{list(own.shape)}", "The mean is taken number by number, over ranks only.",
                    code="wrong_shape")
    if result.dtype != own.dtype:
        raise Wrong(f"{where} returned {result.dtype}, its tensor is {own.dtype}",
                    "Keep the type: divide with `/`, and convert nothing.", code="wrong_dtype")


def _not_the_mean(rank, ranks, tried) -> Wrong:
    results, total = [one.result for one in tried], sum(one.own for one in tried)
    result, own = results[rank], tried[rank].own
    where = f"rank {rank} of {ranks}"
    right = [r for r, other in enumerate(results) if torch.allclose(other, total / ranks)]
    # What it held before, divided or not: a collective that had not written yet.
    if tried[rank].is_async and any(torch.allclose(result, own / n) for n in (1, ranks)):
        return Wrong(f"{where}: nothing from the other ranks was there yet when the tensor was "
                     "used", recording.NOT_WAITED, code="waits_too_late")
    if torch.equal(result, own):
        return Wrong(f"{where} returned its own tensor: nothing from the other ranks is in it"
                     + (f" (rank {right[0]} does hold the mean)" if right else ""), TO_ALL,
                     code="result_on_one_rank" if right else "not_summed")
    if torch.allclose(result, total):
        return Wrong(f"{where} holds the SUM over ranks, {ranks}x the mean",
                     "Divide by the world size.", code="sum_not_mean")
    for divisor in (2, 3, 4, 8):
        if torch.allclose(result, total / divisor):
            return Wrong(f"{where} holds the sum divided by {divisor}, not by {ranks}",
                         "dist.get_world_size() knows how many ranks there are.",
                         code="wrong_divisor")
    if right:
        return Wrong(f"{where} does not hold the mean, though rank {right[0]} does", TO_ALL,
                     code="result_on_one_rank")
    return Wrong(f"{where} holds {_first(result)}, the mean is {_first(total / ranks)}",
                 "Sum over all ranks, then divide by how many there are.", code="wrong_output")


def _require_two_calls(where, names):
    called = f"{where} called {' + '.join(names) or 'nothing'}"
    if "all_reduce" in names:
        raise Wrong(f"{where} called all_reduce itself", "Build it from the other two.",
                    code="ready_made")
    if "reduce_scatter" not in names:
        raise Wrong(f"{called}: no reduce-scatter, so each rank moves or sums more than its share",
                    "First sum piece r on rank r alone: dist.reduce_scatter_single.",
                    code="reduce_scatter_missing")
    if "all_gather" not in names:
        raise Wrong(f"{called}: no all-gather, so the others' pieces never come",
                    "Second step: dist.all_gather_single.", code="all_gather_missing")
    if names != ["reduce_scatter", "all_gather"]:
        raise Wrong(f"{called}, not reduce_scatter + all_gather",
                    "One of each is enough, the sum first.",
                    code="extra_collective" if len(names) > 2 else "wrong_order")


def _require_whole(rank, ranks, result, own):
    where = f"rank {rank} of {ranks}"
    require_tensor(rank, ranks, result)
    if result.numel() == own.numel() // ranks != own.numel():
        raise Wrong(f"{where} returned {result.numel()} numbers of {own.numel()}: only its shard",
                    "Return what was gathered.", code="shard_returned")
    if result.shape != own.shape:
        raise Wrong(f"{where} returned shape {list(result.shape)}, not {list(own.shape)}",
                    "The result is as long as `mine`.", code="wrong_shape")
    if result.dtype != own.dtype:
        raise Wrong(f"{where} returned {result.dtype}, `mine` is {own.dtype}", KEEP_TYPE,
                    code="wrong_dtype")


def _require_sum(rank, ranks, tried, total):
    result, where = tried.result, f"rank {rank} of {ranks}"
    if torch.allclose(result, total):
        return
    if torch.allclose(result * ranks, total):
        raise Wrong(f"{where} holds the mean: the sum divided by {ranks}", "all_reduce sums.",
                    code="averaged")
    pairs = list(zip(result.chunk(ranks), total.chunk(ranks), strict=True))
    piece = next(i for i, pair in enumerate(pairs) if not torch.allclose(*pair))
    held, wanted = map(_first, pairs[piece])
    early = f"{recording.NOT_WAITED} Otherwise: " if tried.is_async else ""
    raise Wrong(f"{where}, piece {piece}: holds {held}, the sum is {wanted}", f"{early}Piece r is "
                "summed on rank r; all pieces are gathered in the order of the ranks.",
                code="wrong_output")


def _require_shards(rank, ranks, tried):
    # Only the shard is gathered: catches whole tensors that are summed afterwards.
    elements, whole = [call.elements for call in tried.calls], len(tried.own)
    if elements != [whole, whole]:
        raise Wrong(f"rank {rank} of {ranks}: {elements[0]} numbers went into the reduce-scatter "
                    f"and {elements[1]} came out of the all-gather; both must be {whole}",
                    "A rank gives its shard alone to the all-gather: 1/N of the tensor.",
                    code="full_tensor_gathered")


def _byte_causes(counted, size, ranks) -> list[Cause]:
    return [
        Cause("whole_tensor_each_step", counted * ranks,
              "as if each step sent the whole tensor, but it sends one piece"),
        Cause("one_half_only", counted / 2,
              "one of the two halves, the reduce-scatter or the all-gather"),
        Cause("limit_for_many_ranks", 2 * size, "that is the limit for very many ranks"),
        Cause("sent_to_every_rank", (ranks - 1) * size,
              "what sending the whole tensor to every other rank would cost"),
        Cause("one_round_only", size, "as if the tensor went round once"),
        Cause("steps_not_bytes", 2 * (ranks - 1), "the number of steps, not of bytes"),
        Cause("elements_not_bytes", counted / 4, "counted in 4-byte numbers, not in bytes"),
        Cause("megabytes_not_bytes", counted / 1e6, "counted in MB, not in bytes")]


def _require_means(rank, means, losses):
    ranks, steps = len(losses), min(map(len, losses))
    where = f"rank {rank} of {ranks}"
    one_each = "Return a list with one mean for each step."
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


def _first(tensor) -> str:
    return f"{tensor.reshape(-1)[0].item():.4g}, …"
