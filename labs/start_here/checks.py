"""The checks of this notebook: real ranks, and what each wrong answer did in one sentence."""

import inspect

import torch

from labs.exercises import verdicts
from labs.exercises.verdicts import Wrong
from labs.start_here import answers, ring
from labs.start_here import ranks as on

LOSSES = (5, 2, 3, 4)  # batches of each rank in check 0.4; another order follows
AGREE = "Agree on the number of steps first: a collective can take a minimum."
RETURNS_NONE = {"NoneType": "A collective writes into its tensor and returns None: call it on a "
                            "line of its own, then use the tensor."}
RING_SIZES = (96, 96_000)  # bytes, divisible by 4-byte numbers on 2, 3 and 4 ranks


@verdicts.check("0.1", hints=RETURNS_NONE)
def check_mean_over_ranks(mean_over_ranks):
    """Every rank must hold the mean of all ranks' tensors, and still hold its own tensor."""
    for ranks in on.TRIED:
        seen = on.run_answer(on.try_mean, mean_over_ranks, ranks=ranks)
        own = [before for before, _, _ in seen]
        mean = sum(own) / ranks
        for rank, (_, result, _) in enumerate(seen):
            _is_like(rank, ranks, result, own[rank])
            if not torch.allclose(result, mean):
                raise _not_the_mean(rank, ranks, own, [result for _, result, _ in seen])
        for rank, (before, _, after) in enumerate(seen):
            if not torch.equal(before, after):
                raise Wrong(f"rank {rank} of {ranks}: `mine` was changed, and its owner still "
                            "needs it", "all_reduce writes into its argument: give it a clone.")
    return "on 2, 3 and 4 ranks, every rank holds the mean and kept its own tensor"


@verdicts.check("0.2", hints=RETURNS_NONE)
def check_all_reduce(all_reduce_in_two):
    """The sum on every rank, by one reduce-scatter and one all-gather of the shards."""
    for ranks in on.TRIED:
        seen = on.run_answer(on.try_all_reduce, all_reduce_in_two, ranks=ranks)
        for rank, (_, _, names, _) in enumerate(seen):
            _two_calls(rank, ranks, names)
        total = sum(own for own, _, _, _ in seen)
        for rank, (own, result, _, elements) in enumerate(seen):
            _is_whole(rank, ranks, result, own)
            _pieces_agree(rank, ranks, result, total)
            _only_shards(rank, ranks, elements, len(own))
    return "one reduce-scatter and one all-gather give all-reduce's sum on 2, 3 and 4 ranks"


@verdicts.check("0.3")
def check_ring_bytes(ring_bytes):
    """The formula must give the bytes that a ring of sends and receives was seen to send."""
    takes_size_and_ranks(ring_bytes)
    for ranks in reversed(on.TRIED):  # on 2 ranks too many formulas agree
        for size in RING_SIZES:
            counted = max(ring.counted_bytes(ranks, size))
            said = ring_bytes(size, ranks)
            answers.must_be_bytes(said)
            if abs(said - counted) > 1e-6 * counted:
                raise _not_the_bytes(said, counted, size, ranks)
    return "your formula equals the bytes counted on rings of 2, 3 and 4 ranks"


@verdicts.check("0.4", hints=RETURNS_NONE | {
    "deadlock": AGREE, "no progress": AGREE, "IndexError": AGREE})
def check_mean_losses(mean_losses):
    """Ranks with different numbers of batches must all stop after the shortest rank's last."""
    for ranks in on.TRIED:
        for lengths in (LOSSES[:ranks], LOSSES[:ranks][::-1], (3,) * ranks):
            seen = on.run_answer(on.try_losses, mean_losses, lengths, ranks=ranks)
            for rank, (means, _) in enumerate(seen):
                _are_the_means(rank, means, [own for _, own in seen])
    return "2, 3 and 4 ranks with unequal batches stop together, with the right means"


def _is_like(rank, ranks, result, own):
    where = f"rank {rank} of {ranks}"
    answers.must_be_tensor(rank, ranks, result)
    if result.shape != own.shape:
        raise Wrong(f"{where} returned shape {list(result.shape)}, its tensor has "
                    f"{list(own.shape)}", "The mean is taken number by number, over ranks only.")
    if result.dtype != own.dtype:
        raise Wrong(f"{where} returned {result.dtype}, its tensor is {own.dtype}",
                    "Keep the type: divide with `/`, and convert nothing.")


def _not_the_mean(rank, ranks, own, results) -> Wrong:
    result, total = results[rank], sum(own)
    where = f"rank {rank} of {ranks}"
    right = [r for r, other in enumerate(results) if torch.allclose(other, total / ranks)]
    if torch.equal(result, own[rank]):
        return Wrong(f"{where} returned its own tensor: nothing from the other ranks is in it"
                     + (f" (rank {right[0]} does hold the mean)" if right else ""),
                     "Every rank must get the result: which collective gives it to all?")
    if torch.allclose(result, total):
        return Wrong(f"{where} holds the SUM over ranks, {ranks}x the mean",
                     "Divide by the world size.")
    for divisor in (2, 3, 4, 8):
        if torch.allclose(result, total / divisor):
            return Wrong(f"{where} holds the sum divided by {divisor}, not by {ranks}",
                         "dist.get_world_size() knows how many ranks there are.")
    if right:
        return Wrong(f"{where} does not hold the mean, though rank {right[0]} does",
                     "Every rank must get the result: which collective gives it to all?")
    return Wrong(f"{where} holds {_first(result)}, the mean is {_first(total / ranks)}",
                 "Sum over all ranks, then divide by how many there are.")


def _two_calls(rank, ranks, names):
    where = f"rank {rank} of {ranks}"
    called = " + ".join(names) or "nothing"
    if "all_reduce" in names:
        raise Wrong(f"{where} called all_reduce itself", "Build it from the other two.")
    if names.count("reduce_scatter") == 0:
        raise Wrong(f"{where} called {called}: no reduce-scatter, so each rank moves or sums more "
                    "than its share",
                    "First sum piece r on rank r alone: dist.reduce_scatter_tensor.")
    if names.count("all_gather") == 0:
        raise Wrong(f"{where} called {called}: no all-gather, so the others' pieces never come",
                    "Second step: dist.all_gather_into_tensor.")
    if names != ["reduce_scatter", "all_gather"]:
        raise Wrong(f"{where} called {called}, not reduce_scatter + all_gather",
                    "One of each is enough, the sum first.")


def _only_shards(rank, ranks, elements, whole):
    if elements != [whole, whole]:
        raise Wrong(f"rank {rank} of {ranks}: {elements[0]} numbers went into the reduce-scatter "
                    f"and {elements[1]} came out of the all-gather; both must be {whole}",
                    "A rank gives its shard alone to the all-gather: 1/N of the tensor.")


def _is_whole(rank, ranks, result, own):
    where = f"rank {rank} of {ranks}"
    answers.must_be_tensor(rank, ranks, result)
    if result.numel() == own.numel() // ranks != own.numel():
        raise Wrong(f"{where} returned {result.numel()} numbers of {own.numel()}: only its shard",
                    "Return what was gathered.")
    if result.shape != own.shape:
        raise Wrong(f"{where} returned shape {list(result.shape)}, not {list(own.shape)}",
                    "The result is as long as `mine`.")


def _pieces_agree(rank, ranks, result, total):
    if torch.allclose(result, total):
        return
    if torch.allclose(result * ranks, total):
        raise Wrong(f"rank {rank} of {ranks} holds the mean: the sum divided by {ranks}",
                    "all_reduce sums.")
    pairs = list(zip(result.chunk(ranks), total.chunk(ranks), strict=True))
    piece = next(i for i, (one, other) in enumerate(pairs) if not torch.allclose(one, other))
    held, wanted = map(_first, pairs[piece])
    raise Wrong(f"rank {rank} of {ranks}, piece {piece}: holds {held}, the sum is {wanted}",
                "Piece r is summed on rank r; all pieces are gathered in the order of the ranks.")


def takes_size_and_ranks(ring_bytes):
    """Raises Wrong unless it can be called as ring_bytes(size, ranks)."""
    try:
        inspect.signature(ring_bytes).bind(96, 4)
    except TypeError as error:
        raise Wrong(f"ring_bytes(size, ranks) cannot be called: {error}",
                    "Keep the first line of the function as it was.") from None


def _not_the_bytes(said, counted, size, ranks) -> Wrong:
    costs = {counted * ranks: "as if each step sent the whole tensor, but it sends one piece",
             counted / 2: "one of the two halves, the reduce-scatter or the all-gather",
             2 * size: "that is the limit for very many ranks",
             (ranks - 1) * size: "what sending the whole tensor to every other rank would cost",
             size: "as if the tensor went round once",
             2 * (ranks - 1): "the number of steps, not of bytes",
             counted / 4: "counted in 4-byte numbers, not in bytes",
             counted / 1e6: "counted in MB, not in bytes"}
    why = next((f": {words}" for cost, words in costs.items()
                if abs(said - cost) <= 1e-6 * cost), "")
    return Wrong(f"{size:,} bytes on {ranks} ranks: each sent {counted:,}, your formula says "
                 f"{said:,.10g}{why}", "How many steps, and how many bytes leave in each?")


def _are_the_means(rank, means, losses):
    ranks, steps = len(losses), min(map(len, losses))
    where = f"rank {rank} of {ranks}"
    if not isinstance(means, list):
        raise Wrong(f"{where} returned {answers.kind(means)}, not a list",
                    "Return a list with one mean for each step.")
    if len(means) != steps:
        raise Wrong(f"{where} returned {len(means)} means; the shortest rank has {steps} batches",
                    AGREE)
    for step in range(steps):
        each = [own[step] for own in losses]
        if not isinstance(means[step], float):
            raise Wrong(f"{where}, step {step}: {answers.kind(means[step])}, not a number",
                        "Return a list with one mean for each step.")
        if not abs(means[step] - sum(each) / ranks) <= 1e-4:  # so written, it rejects nan too
            raise Wrong(f"{where}, step {step}: {_wrong_mean(means[step], each, rank)}",
                        "Sum over ranks, then divide by the world size.")


def _wrong_mean(value, each, rank) -> str:
    if abs(value - each[rank]) < 1e-4:
        return "this is the rank's own loss, nothing came from the others"
    if abs(value - sum(each)) < 1e-4:
        return f"this is the SUM over ranks, {len(each)}x the mean"
    return f"{value:.4g} is not the mean over ranks, {sum(each) / len(each):.4g}"


def _first(tensor) -> str:
    return f"{tensor.reshape(-1)[0].item():.4g}, …"
