"""Synthetic jobs: what ranks of other libraries send and store, with properties that mislead."""

import random
from collections.abc import Iterator

from labs.checks.generator import new_generator
from labs.meters.evidence import PARTS, RankStepRecord
from labs.meters.traffic import CollectiveCall

# kind -> collectives of a step, (kind, share of the gradients' bytes or of the parameters')
_GRADIENTS, _PARAMETERS, _LOSS = "gradients", "parameters", "loss"
_TRAFFIC = {
    "separate": [[], [("all_reduce", _LOSS)], [("all_gather", _PARAMETERS), ("barrier", _LOSS)],
                 [("broadcast", _PARAMETERS)]],
    "DDP": [[("all_reduce", _GRADIENTS)], [("broadcast", _LOSS), ("all_reduce", _GRADIENTS)],
            # an all-reduce in its two halves
            [("reduce_scatter", _GRADIENTS), ("all_gather", _GRADIENTS)],
            [("all_reduce", _GRADIENTS), ("all_gather", _LOSS)]],
    "ZeRO-1": [[("all_reduce", _GRADIENTS), ("broadcast", _GRADIENTS)],
               [("all_reduce", _GRADIENTS), ("all_gather", _GRADIENTS)],
               [("reduce_scatter", _GRADIENTS), ("all_gather", _GRADIENTS)]],
    "ZeRO-2": [[("all_reduce", _GRADIENTS), ("all_gather", _GRADIENTS)],
               [("reduce_scatter", _GRADIENTS), ("all_gather", _GRADIENTS)],
               [("reduce", _GRADIENTS), ("broadcast", _GRADIENTS)]],
    "ZeRO-3": [[("all_gather", _PARAMETERS), ("all_gather", _PARAMETERS),
                ("reduce_scatter", _GRADIENTS)],
               [("all_gather", _PARAMETERS), ("reduce_scatter", _GRADIENTS)],
               [("broadcast", _PARAMETERS), ("all_reduce", _GRADIENTS)]]}
_REDUCING = ("all_reduce", "reduce_scatter", "reduce")
_SHARDED = {"separate": (), "DDP": (), "ZeRO-1": PARTS[2:], "ZeRO-2": PARTS[1:], "ZeRO-3": PARTS}
_MODULES = ("DistributedDataParallel", "FSDPQwen2ForCausalLM", "DeepSpeedEngine",
            "Qwen2ForCausalLM", "OptimizedModule")
_LIBRARIES = ("DistributedType.MULTI_CPU", "DistributedType.FSDP", "DistributedType.DEEPSPEED",
              "DistributedType.NO", "")


def jobs(seed: int | None = None) -> Iterator[tuple[str, str, list[RankStepRecord]]]:
    """(what it is, the right name, what each rank did) of every job; sizes are drawn at random."""
    rng = new_generator() if seed is None else random.Random(seed)
    for kind, variants in _TRAFFIC.items():
        for number, variant in enumerate(variants):
            # many gradients may be missing where "near N copies" leaves room for that
            many = number % 2
            yield _job(rng, kind, variant, rng.choice((4, 8, 16) if many else (2, 3, 4, 8, 16)),
                       0.8 if many else rng.choice((1, 0.95)))
        yield _job(rng, kind, rng.choice(variants), 2, 0.95)
    for kind in ("DDP", "ZeRO-3"):  # libraries call collectives on one rank, too
        yield _job(rng, kind, _TRAFFIC[kind][0], 1)


def _job(rng, kind, variant, ranks, there=1.0) -> tuple[str, str, list[RankStepRecord]]:
    parameters = rng.randrange(10**6, 10**9) * rng.choice((2, 4))
    share = rng.choice((1, 1, 0.37, 0.01))  # trainable: the rest is frozen
    gradients = int(share * parameters)
    whole = {"parameters": parameters, "gradients": gradients,
             "optimizer_state": rng.choice((2, 4)) * gradients}  # 4: moments in fp32 of 16 bits
    # Missing gradients hold no memory, so there may be less than N copies of them.
    by_part = {part: _by_rank(rng, whole[part] * (there if part == _GRADIENTS else 1), ranks,
                              part in _SHARDED[kind]) for part in PARTS}
    sizes = {_GRADIENTS: gradients, _PARAMETERS: parameters, _LOSS: 4}
    # A gradient that is missing is not added up either.
    calls = [call for name, what in variant for call in _calls(
        rng, name, int(sizes[what] * (there if (what, name in _REDUCING) == (_GRADIENTS, True)
                                       else 1)), ranks)]
    module, library = rng.choice(_MODULES), rng.choice(_LIBRARIES)  # say nothing
    found = [RankStepRecord(list(calls), {part: by_part[part][rank] for part in PARTS}, dict(whole),
                          module, library) for rank in range(ranks)]
    frozen = f", {1 - share:.0%} of the parameters frozen" * (share < 1)
    missing = f", {1 - there:.0%} of the gradients missing" * (there < 1)
    return (f"random: {ranks} rank{'s' * (ranks > 1)}{frozen}{missing}",
            kind if ranks > 1 else "one process", found)


def _by_rank(rng, whole, ranks, is_sharded) -> list[int]:
    """What each rank holds of a part. Shards are padded, or of entire parameters and so uneven."""
    if not is_sharded or ranks == 1:
        return [int(whole)] * ranks
    if rng.random() < 0.5:
        return [int(rng.uniform(1.0, 1.2) * whole / ranks)] * ranks
    weights = [rng.uniform(0.2, 1) for _ in range(ranks)]
    weights[rng.randrange(ranks)] *= 4  # it has the embedding
    return [int(whole * weight / sum(weights)) for weight in weights]


def _calls(rng, kind, nbytes, ranks) -> Iterator[CollectiveCall]:
    """A collective, in several buckets where it is large."""
    if kind == "barrier":
        yield CollectiveCall(kind, 0, 0, False, 0.0, ranks)
        return
    buckets = rng.randrange(1, 9) if nbytes > 1000 else 1
    for number in range(buckets):
        size = nbytes // buckets + (nbytes % buckets) * (number == 0)
        yield CollectiveCall(kind, size // 2, size, True, 0.0, ranks)
