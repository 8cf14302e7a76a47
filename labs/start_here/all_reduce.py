"""Exercise 0.2: an all-reduce from two halves; and the picture of a ring that does both, step by
step."""

from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise

import torch

from labs.checks.verdicts import Wrong, check, shows
from labs.pictures import ring
from labs.pictures.collectives import State
from labs.pictures.widgets import Choice, Controls
from labs.start_here import recorded_collectives
from labs.start_here.recorded_collectives import RETURNS_NONE, first_number, try_on_ranks
from labs.start_here.return_values import KEEP_TYPE, require_tensor, require_world_size
from labs.workers import devices


@check("0.2", hints=RETURNS_NONE | {"dtype": KEEP_TYPE})
def check_all_reduce(all_reduce_in_two: Callable):
    """The sum on every rank, by one reduce-scatter and one all-gather of the shards."""
    for tried in try_on_ranks(all_reduce_in_two, recorded_collectives.tensors_to_sum):
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
    # Piece r is rank r's shard: which one is wrong says which rank's part went wrong.
    pairs = list(zip(result.chunk(ranks), total.chunk(ranks), strict=True))
    piece = next(i for i, pair in enumerate(pairs) if not torch.allclose(*pair))
    held, wanted = map(first_number, pairs[piece])
    early = f"{recorded_collectives.NOT_WAITED} Otherwise: " if tried.is_async else ""
    raise Wrong(f"{where}, piece {piece}: holds {held}, the sum is {wanted}", f"{early}Piece r is "
                "summed on rank r; all pieces are gathered in the order of the ranks.",
                code="wrong_output")


def _require_shards(rank, ranks, tried):
    # Only the shard is gathered: catches full tensors that are summed afterwards.
    elements, whole = [call.elements for call in tried.calls], len(tried.own)
    if elements != [whole, whole]:
        raise Wrong(f"rank {rank} of {ranks}: {elements[0]} numbers went into the reduce-scatter "
                    f"and {elements[1]} came out of the all-gather; both must be {whole}",
                    "A rank gives its shard alone to the all-gather: 1/N of the tensor.",
                    code="full_tensor_gathered")


@shows("Ring")
def ring_steps(algorithm: Callable, ranks: int = 4) -> Controls:
    """Runs `algorithm(mine)`, made of sends and receives, and draws the step of it that a slider
    chooses, at first step 1; without a live kernel, the beginning, the middle and the end."""
    states = ring_states(algorithm, ranks)
    options = [(state.title.removeprefix("step "), number) for number, state in enumerate(states)]

    @cache  # who moves the slider back sees at once what was drawn before
    def live(number):
        return ring.ring_step(states, number).html()

    # Step 1 has arrows, so it is seen at once that there is something to move.
    first = min(1, len(states) - 1)
    return Controls([Choice("number", "step", options, first)], partial(ring.ring_step, states),
                    live, still=ring.ring_still(states))


def ring_states(algorithm: Callable, ranks: int) -> list[State]:
    """What each rank holds before the first and after each step of `algorithm(mine)`."""
    require_world_size(ranks)
    with devices.send_recv_device(ranks):
        recorded = recorded_collectives.run_answer(
            recorded_collectives.record_sends, algorithm, ranks=ranks)
    # recorded[rank][step] becomes steps[step][rank].
    steps = [list(held) for held in zip(*recorded, strict=True)]
    titles = ["before"] + [f"step {number}: {ring.action(ring.received(old, new))}"
                           for number, (old, new) in enumerate(pairwise(steps), 1)]
    return list(map(State, titles, steps))
