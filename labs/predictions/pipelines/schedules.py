"""The known schedules, for any number of ranks and micro-batches.

Sources: GPipe (Huang et al. 2019); 1F1B with a flush, and interleaved (Narayanan et al. 2021,
"Efficient Large-Scale Language Model Training on GPU Clusters", section 2.2); zero bubble (Qi et
al. 2023, arXiv 2401.10241, section 2).
"""

from labs.predictions.pipelines.schedule import B, ChunkAction, F, Schedule, W


def gpipe(ranks: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards."""
    one = [*map(F, range(micro_batches)), *map(B, range(micro_batches))]
    return Schedule.from_lists([one] * ranks, micro_batches)


def one_f_one_b(ranks: int, micro_batches: int) -> Schedule:
    """Rank r runs p - 1 - r forwards, then a forward and a backward in turn, then the backwards
    that are left."""
    return Schedule.from_lists([_alternate(micro_batches, ranks - 1 - rank)
                                for rank in range(ranks)], micro_batches)


def interleaved(ranks: int, micro_batches: int, chunks: int) -> Schedule:
    """1F1B on v chunks a rank, in Megatron-LM's order: p micro-batches through the first chunk, the
    same p through the next one, and so on. Raises ValueError unless m is a multiple of p."""
    if micro_batches % ranks:
        raise ValueError(f"{micro_batches} micro-batches are not a multiple of {ranks} ranks; "
                         "Megatron's interleaved order needs that")
    total = micro_batches * chunks
    lists = []
    for rank in range(ranks):
        warm_up = min(total, 2 * (ranks - 1 - rank) + (chunks - 1) * ranks)
        forwards = [_turn(F, number, ranks, chunks) for number in range(total)]
        backwards = [_turn(B, number, ranks, chunks) for number in range(total)]
        pairs = zip(forwards[warm_up:], backwards, strict=False)
        lists.append([*forwards[:warm_up], *(action for pair in pairs for action in pair),
                      *backwards[total - warm_up:]])
    return Schedule.from_lists(lists, micro_batches, chunks)


def zb_h1(ranks: int, micro_batches: int) -> Schedule:
    """1F1B with split backward; rank r runs the W of a micro-batch r backwards later, and what is
    left at the end, where 1F1B waits. As much memory as 1F1B's first rank."""
    return _zero_bubble(ranks, micro_batches, 1)


def zb_h2(ranks: int, micro_batches: int) -> Schedule:
    """Twice the forwards before the first backward and twice the delay of W: no bubble within a
    rank where F, B and W take equally long, for nearly twice the memory."""
    return _zero_bubble(ranks, micro_batches, 2)


def _zero_bubble(ranks, micro_batches, depth) -> Schedule:
    lists = []
    for rank in range(ranks):
        delay, actions = depth * rank, []
        for action in _alternate(micro_batches, depth * (ranks - 1 - rank)):
            actions.append(action)
            if action.kind == "B" and action.micro_batch >= delay:
                actions.append(W(action.micro_batch - delay))
        left = range(max(0, micro_batches - delay), micro_batches)
        lists.append([*actions, *map(W, left)])
    return Schedule.from_lists(lists, micro_batches)


def _alternate(micro_batches, warm_up) -> list[ChunkAction]:
    """So many forwards, F and B in turn, and the backwards that are left."""
    warm_up = min(warm_up, micro_batches)
    steady = range(micro_batches - warm_up)
    return [*map(F, range(warm_up)),
            *(action for i in steady for action in (F(i + warm_up), B(i))),
            *map(B, range(micro_batches - warm_up, micro_batches))]


def _turn(kind, number, ranks, chunks) -> ChunkAction:
    """The number-th forward or backward of a rank in the interleaved order."""
    group, place = divmod(number, ranks * chunks)
    chunk, within = divmod(place, ranks)
    return kind(group * ranks + within, chunk if kind is F else chunks - 1 - chunk)
