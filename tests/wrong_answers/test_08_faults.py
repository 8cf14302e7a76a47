"""Exercises 8.10 and 8.11: what their checks must reject, with the words that must say why; and
what they must accept."""

import hashlib
import sys
from collections import Counter
from statistics import mean, median

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from _build.definitions import definitions
from answers import assert_rejected, assert_waits, judge_all

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


# 8.11 find_straggler


def always(*answer):
    return lambda timings: answer or None


def parts(timings, names=("data", "compute", "collectives")):
    return [[sum(getattr(step, name) for name in names) for step in own] for own in timings]


def longest_step(timings):
    totals = [sum(own) for own in parts(timings)]
    return totals.index(max(totals)), "compute", 0


def waits_most(timings):
    found = right.find_straggler(timings)
    waits = [sum(own) for own in parts(timings, ("collectives",))]
    return found and (waits.index(max(waits)), *found[1:])


def waits_least(timings):
    found = right.find_straggler(timings)
    waits = [median(own[-10:]) for own in parts(timings, ("collectives",))]
    return found and (waits.index(min(waits)), *found[1:])


def but(change):
    """The right answer, changed."""
    def find_straggler(timings):
        found = right.find_straggler(timings)
        return found and change(*found)
    return find_straggler


def by_its_own_past(timings):
    """Compares no ranks: whoever computes longer than at the beginning."""
    for cause in ("compute", "data"):
        for rank, own in enumerate(parts(timings, (cause,))):
            extra = [each - median(own[:10]) for each in lab.smooth(own)]
            if extra[-1] > 0.02:
                return rank, cause, next(at for at, each in enumerate(extra) if each > 0.02)
    found = right.find_straggler(timings)
    return found if found and found[1] == "link" else None


def by_ratio(timings):
    """Twice as long as the others, however little that is."""
    for cause in ("data", "compute"):
        means = [median(own[-10:]) for own in parts(timings, (cause,))]
        for rank, own in enumerate(means):
            if own > 1.4 * median(means[:rank] + means[rank + 1:]):
                found = right.find_straggler(timings)
                return rank, cause, found[2] if found else 0
    return right.find_straggler(timings)


def by_mean(timings):
    """The mean over all steps: a single one decides."""
    for cause in ("compute", "data"):
        means = [mean(own) for own in parts(timings, (cause,))]
        for rank, own in enumerate(means):
            if own - median(means[:rank] + means[rank + 1:]) > 0.02:
                found = right.find_straggler(timings)
                return rank, cause, found[2] if found else 0
    return right.find_straggler(timings)


def one_late_step(timings):
    """Since the first step that is longer, outlier or not."""
    found = right.find_straggler(timings)
    if found is None or found[1] == "link":
        return found
    rank, cause, since = found
    own = parts(timings, (cause,))
    others = [median(same) for same in zip(*own[:rank], *own[rank + 1:], strict=True)]
    return rank, cause, next(at for at, other in enumerate(others)
                             if own[rank][at] - other > 0.05)


def link_first(timings):
    """Anybody is in collectives longer: the link."""
    most = [max(step.collectives for step in same) for same in zip(*timings, strict=True)]
    late = [each > 1.3 * median(most[:10]) for each in lab.smooth(most)]
    if late[-1]:
        return None, "link", max(at for at, is_late in enumerate(late) if not is_late) + 1
    return right.find_straggler(timings)


def no_link(timings):
    found = right.find_straggler(timings)
    return found if found and found[1] != "link" else None


def has_recovered(timings):
    """Never looks whether it is still slow."""
    kept = [own[:24] for own in timings] if len(timings[0]) == 45 else timings
    return right.find_straggler(kept)


def empties(timings):
    found = right.find_straggler(timings)
    timings.clear()
    return found


def in_tensors(timings):
    """Tensors instead of lists; a list as the answer."""
    own = torch.tensor([[[step.data, step.compute, step.collectives] for step in rank]
                        for rank in timings], dtype=torch.float64)
    usual, steps = own.sum(2).median(), own.shape[1]

    def since(extra):
        windows = torch.nn.functional.pad(extra[None, None], (2, 2), mode="replicate")[0, 0]
        late = windows.unfold(0, 5, 1).median(1).values > usual / 10
        quiet = (~late).nonzero()
        first = int(quiet.max()) + 1 if len(quiet) else 0
        return first if first <= steps - 5 else None

    for part, cause in ((1, "compute"), (0, "data")):
        for rank in range(len(own)):
            others = torch.cat([own[:rank, :, part], own[rank + 1:, :, part]])
            at = since(own[rank, :, part] - others.quantile(0.5, dim=0))
            if at is not None:
                return [rank, cause, torch.tensor(at)]
    least = own[:, :, 2].min(0).values
    at = since(least - least[:10].median())
    return None if at is None else [None, "link", at]


WRONG_STRAGGLER = [
    (always(), "nothing_returned"),
    (always(2, "compute"), "wrong_count"),
    (always(2, "slow", 20), "unknown_name 'slow'"),
    (always(2, "compute", 20), "no_straggler"),
    (longest_step, "wrong_straggler|no_straggler"),
    (waits_most, "wrong_straggler"),
    (waits_least, "wrong_straggler"),
    (but(lambda rank, cause, since: (rank, "compute", since)), "wrong_straggler"),
    (but(lambda rank, cause, since: (rank, cause, 0)), "wrong_step"),
    (but(lambda rank, cause, since: (rank, cause, since + 3)), "wrong_step"),
    (but(lambda rank, cause, since: (rank or 0, cause, since)), "wrong_straggler"),
    (but(lambda rank, cause, since: (str(rank), cause, since)), "wrong_type numbers"),
    (by_its_own_past, "nothing_returned|wrong_straggler|no_straggler"), (by_ratio,
     "wrong_straggler|no_straggler|wrong_step"),
    (by_mean, "no_straggler|wrong_straggler|wrong_step"), (one_late_step, "wrong_step"),
    (link_first, "wrong_straggler"), (no_link, "nothing_returned slower"),
    (has_recovered, "no_straggler|nothing_returned|wrong_step"), (empties, "changes_input timings")]
RIGHT_STRAGGLER = [right.find_straggler, in_tensors]


@pytest.fixture
def no_recording(monkeypatch):
    """The synthetic jobs alone."""
    monkeypatch.setattr(straggler_jobs, "recorded_stragglers", dict)


@pytest.mark.parametrize(("answer", "words"), WRONG_STRAGGLER)
def test_wrong_stragglers(answer, words, no_recording):
    verdict = lab.check_find_straggler(answer)
    print(verdict)
    assert_rejected(verdict, words)


@pytest.mark.parametrize("answer", RIGHT_STRAGGLER)
@pytest.mark.parametrize("seed", ["1", "2", "3"])
def test_right_stragglers(answer, seed, no_recording, monkeypatch):
    monkeypatch.setenv("WORKBOOK_SEED", seed)
    verdict = lab.check_find_straggler(answer)
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize(("check", "exercise"), [
    (lab.check_find_corrupt, "8.10"), (lab.check_find_straggler, "8.11")])
def test_unfilled(check, exercise, no_recording, warm_launcher):
    assert_waits(check, exercise)
