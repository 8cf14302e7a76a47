"""Saving and loading when no rank has everything: each rank saves its shards, and the shards of one
number of ranks are loaded on another."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from labs.zero_stages.scaffold.optimizer import ShardedOptimizer


def sharded_state_dict(optimizer: ShardedOptimizer) -> list[dict]:
    """On a rank: what it must save to resume, a dict for each flat parameter: "elements", without
    padding, this rank's "shard", and the shards of its optimizer "state"."""
    def copied(tensor):  # to the CPU, as in a file: whoever loads it may have no GPU
        return tensor.detach().to("cpu", copy=True)

    return [{"elements": flat.elements, "shard": copied(flat.shard), "state": {
        name: copied(value) for name, value in optimizer.state[flat.shard].items()}}
        for flat in optimizer.flats]


def load_sharded_state_dict(optimizer: ShardedOptimizer, saved: list[list[dict]],
                            reshard: Callable) -> None:
    """On a rank: loads what an earlier run saved, on however many ranks.

    saved[r]: what `sharded_state_dict` returned on its rank r. reshard(read, elements, before,
    after, rank): this rank's shard, where read(old, begin, end) is a slice of old rank's shard.
    """
    before, rank, after = len(saved), dist.get_rank(), dist.get_world_size()
    for number, flat in enumerate(optimizer.flats):
        parts = [by_flat[number] for by_flat in saved]

        def own(shards, flat=flat):
            return reshard(lambda old, begin, end: shards[int(old)][int(begin):int(end)],
                           flat.elements, before, after, rank)

        with torch.no_grad():
            flat.shard.copy_(own([part["shard"] for part in parts]))
        optimizer.state[flat.shard] = {  # AdamW's step, a scalar, is the same on all ranks
            name: own([part["state"][name] for part in parts]).to(flat.shard.device, copy=True)
            if value.dim() else value
            for name, value in parts[0]["state"].items()}
    optimizer.gather()
