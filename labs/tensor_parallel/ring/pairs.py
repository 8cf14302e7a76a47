"""How many pairs of query and key each rank computes in each round of the ring, counted.

A causal kernel computes the pairs in which the key is not after the query, so they are what a round
costs; the round is over when the rank with most of them is done. In round k a rank has the keys of
the rank k places before it. Source of the balanced assignment: Brandon et al., "Striped Attention"
(arXiv 2311.09431), and the head-tail pairing of Llama 3's context parallelism (arXiv 2407.21783,
section 3.3.2).
"""

from collections.abc import Sequence

import torch

Places = Sequence[torch.Tensor]  # by rank, the positions of its tokens


def visible_pairs(queries: torch.Tensor, keys: torch.Tensor) -> int:
    """Pairs in which the key is at the query's position or before it."""
    return int(torch.searchsorted(keys.sort().values, queries.contiguous(), right=True).sum())


def pairs_by_round(places: Places) -> list[list[int]]:
    """Round -> rank -> pairs that it computes."""
    ranks = len(places)
    return [[visible_pairs(places[rank], places[(rank - passed) % ranks]) for rank in range(ranks)]
            for passed in range(ranks)]


def makespan(rounds: Sequence[Sequence[int]]) -> int:
    """Pairs on the critical path: of each round those of the rank that has most, because all wait
    for it before K and V go on."""
    return sum(max(by_rank) for by_rank in rounds)


def least_makespan(rounds: Sequence[Sequence[int]]) -> float:
    """Pairs of each rank where all have the same number in every round."""
    return sum(map(sum, rounds)) / len(rounds)
