"""What the check of exercise 8.10 must reject, and what it must accept."""

import hashlib
import sys
from collections import Counter

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from _build.definitions import definitions
from answers import assert_waits, judge_all

import labs.surviving_failure as lab
from labs.surviving_failure import find_straggler as straggler_jobs
from labs.training.models import local_shard

cloudpickle.register_pickle_by_value(sys.modules[__name__])
right = definitions("08_surviving_failure")


# 8.10 find_corrupt


def tensors_of(module):
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def by(digest_of, tensors=tensors_of, judged=None):
    """An answer with another digest, of other tensors, or with another judgement of the digests."""
    def find_corrupt(module, group):
        own = {name: digest_of(tensor) for name, tensor in tensors(module).items()}
        ranks = dist.get_process_group_ranks(group)
        everyone = [None] * len(ranks)
        dist.all_gather_object(everyone, own, group=group)
        found = {name: (judged or majority)([each[name] for each in everyone], ranks)
                 for name in own}
        return {name: odd for name, odd in found.items() if odd is not None}
    return find_corrupt


def sha(tensor):
    return hashlib.sha256(lab.tensor_bytes(tensor)).hexdigest()


def majority(digests, ranks):
    usual, count = Counter(digests).most_common(1)[0]
    if count == len(digests):
        return None
    odd = [rank for rank, each in zip(ranks, digests, strict=True) if each != usual]
    return odd if 2 * count > len(digests) else []


def like_rank_0(digests, ranks):
    odd = [rank for rank, each in zip(ranks, digests, strict=True) if each != digests[0]]
    return odd or None


def most_common(digests, ranks):
    usual, _ = Counter(digests).most_common(1)[0]
    return [rank for rank, each in zip(ranks, digests, strict=True) if each != usual] or None


def never_named(digests, ranks):
    return None if len(set(digests)) == 1 else []


def in_group(digests, ranks):
    return majority(digests, range(len(ranks)))


def summed(tensor):
    return local_shard(tensor.detach()).double().sum().item()


def checksum(tensor):
    """The sum of the bits as whole numbers of 8 bits, weighted by their place."""
    data = torch.frombuffer(bytearray(lab.tensor_bytes(tensor)), dtype=torch.uint8).long()
    return int((data * torch.arange(1, len(data) + 1)).sum())


def rank_0_only(module, group):
    found = right.find_corrupt(module, group)
    return found if dist.get_rank() == 0 else {}


def without_group(module, group):
    own, everyone = {}, [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return right.find_corrupt(module, group)


def gathers_tensors(module, group):
    own = {name: local_shard(tensor.detach()) for name, tensor in tensors_of(module).items()}
    everyone = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group=group)
    return right.find_corrupt(module, group)


def repairs(module, group):
    found = right.find_corrupt(module, group)
    for name in found:
        tensors_of(module)[name].data.zero_()
    return found


def under_names_of_ddp(module, group):
    return {f"module.{name}": ranks for name, ranks in right.find_corrupt(module, group).items()}


def all_equal_ranks(module, group):
    return {name: dist.get_process_group_ranks(group) for name in tensors_of(module)}


def first_only(module):
    return dict(list(module.named_parameters())[:1])


def by_checksums(module, group):
    """The same with a tensor of int64 instead of objects."""
    named = tensors_of(module)
    own = torch.tensor([checksum(tensor) for tensor in named.values()])
    ranks = dist.get_process_group_ranks(group)
    everyone = [torch.empty_like(own) for _ in ranks]
    dist.all_gather(everyone, own, group=group)
    found = {}
    for at, name in enumerate(named):
        odd = majority([int(each[at]) for each in everyone], ranks)
        if odd is not None:
            found[name] = odd
    return found


WRONG_CORRUPT = [
    (lambda module, group: None, "wrong_type nothing"),
    (lambda module, group: {}, "missing_entry"),
    (all_equal_ranks, "extra_entry"),
    (by(sha, judged=never_named), "suspects_not_named"),
    (by(sha, judged=like_rank_0), "wrong_ranks"),
    (by(sha, judged=most_common), "undecidable"),
    (by(sha, judged=in_group), "wrong_ranks"),
    (by(lambda tensor: summed(tensor)), "extra_entry"),
    (by(lambda tensor: str(round(local_shard(tensor).float().norm().item(), 3))), "missing_entry"),
    (by(lambda tensor: str(local_shard(tensor).float().sum().item())), "missing_entry"),
    (by(sha, first_only), "missing_entry 'bias'"),
    (by(sha, lambda module: dict(module.named_parameters())), "missing_entry 'mean'"),
    (by(sha, lambda module: module.state_dict()), "missing_entry 'angles'"),
    (by(sha, lambda module: {name: p for name, p in tensors_of(module).items()
                             if p.requires_grad or not isinstance(p, torch.nn.Parameter)}),
     "missing_entry 'frozen'"),
    (by(lambda tensor: hash(lab.tensor_bytes(tensor))), "extra_entry"),
    (rank_0_only, "missing_entry"),
    (without_group, "wrong_group"),
    (gathers_tensors, "wrong_traffic"),
    (repairs, "changes_input find_corrupt"),
    (under_names_of_ddp, "unknown_name 'module.weight'"),
    (lambda module, group: {"weight": 5}, "wrong_type 'weight'")]
RIGHT_CORRUPT = [right.find_corrupt, by(sha), by_checksums]


@pytest.mark.slow
def test_find_corrupt(warm_launcher):
    judge_all(lab.check_find_corrupt, WRONG_CORRUPT, RIGHT_CORRUPT, ranks=6)


@pytest.fixture
def no_recording(monkeypatch):
    """The synthetic jobs alone."""
    monkeypatch.setattr(straggler_jobs, "recorded_stragglers", dict)


def test_an_unfilled_exercise_waits(no_recording, warm_launcher):
    assert_waits(lab.check_find_corrupt, "8.10")
