"""What the check of exercise 7.8 must reject, with the words that must say why, and what it must
accept. `pytest -s` prints the verdicts."""

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from _build.definitions import definitions
from answers import assert_rejected, assert_waits, judge_in_one_launch

import labs.tensor_parallel as lab

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("warm_launcher")
right = definitions("07a_tensor_parallel")


class Seeded(right.ResumableStreams):
    """The right answer with other seeds."""

    def __init__(self, seed, group):
        shared, own = self.seeds(seed, dist.get_rank(group), dist.get_world_size(group))
        self.shared = torch.Generator().manual_seed(shared)
        self.own = torch.Generator().manual_seed(own)


class Wrong:
    class NothingDropped(right.ResumableStreams):
        def dropout(self, x, p, is_shard):
            return x

    class Default(right.ResumableStreams):
        """torch's dropout, which draws from the default generator."""

        def dropout(self, x, p, is_shard):
            return F.dropout(x, p)

    class DefaultSeeded(right.ResumableStreams):
        """The default generator, put where the stream is."""

        def dropout(self, x, p, is_shard):
            torch.set_rng_state((self.own if is_shard else self.shared).get_state())
            y = F.dropout(x, p)
            (self.own if is_shard else self.shared).set_state(torch.get_rng_state())
            return y

    class OneSeedForAll(Seeded):
        def seeds(self, seed, rank, ranks):
            return seed, seed

    class OneSeedForAllShards(Seeded):
        def seeds(self, seed, rank, ranks):
            return 2 * seed, 2 * seed + 1

    class DifferentEverywhere(Seeded):
        def seeds(self, seed, rank, ranks):
            return 1000 * seed + rank, 1000 * seed + 100 + rank

    class Exchanged(right.ResumableStreams):
        def dropout(self, x, p, is_shard):
            return super().dropout(x, p, not is_shard)

    class SharedIsRankZeros(Seeded):
        """seed + rank: rank 0's own stream is the shared one."""

        def seeds(self, seed, rank, ranks):
            return 10 * seed, 10 * seed + rank

    class SeedPlusRank(Seeded):
        """A replica's rank 1 draws what the next replica's rank 0 draws."""

        def seeds(self, seed, rank, ranks):
            return seed, seed + 1 + rank

    class FixedDistance(Seeded):
        """seed 1000 is that of rank 0's own stream with seed 0."""

        def seeds(self, seed, rank, ranks):
            return seed, seed + 1000 * (rank + 1)

    class OneRowForAll(right.ResumableStreams):
        """A mask of one row, for all rows."""

        def dropout(self, x, p, is_shard):
            keep = torch.rand(x.shape[1:], generator=self.own if is_shard else self.shared) >= p
            return x * keep / (1 - p)

    class SharedNotReloaded(right.ResumableStreams):
        def load_state_dict(self, state):
            self.own.set_state(state["own"])

    class Restarted(right.ResumableStreams):
        """Seeded again in each step."""

        def __init__(self, seed, group):
            super().__init__(seed, group)
            self.first = self.state_dict()

        def dropout(self, x, p, is_shard):
            self.load_state_dict(self.first)
            return super().dropout(x, p, is_shard)

    class NotScaled(right.ResumableStreams):
        def dropout(self, x, p, is_shard):
            return super().dropout(x, p, is_shard) * (1 - p)

    class KeptInsteadOfDropped(right.ResumableStreams):
        def dropout(self, x, p, is_shard):
            keep = torch.rand(x.shape, generator=self.own if is_shard else self.shared) < p
            return x * keep / max(p, 1e-9)

    class InPlace(right.ResumableStreams):
        def dropout(self, x, p, is_shard):
            y = super().dropout(x, p, is_shard)
            x.data.copy_(y.data)
            return y

    class GradientLost(right.ResumableStreams):
        def dropout(self, x, p, is_shard):
            return super().dropout(x.detach(), p, is_shard)

    class Promoted(right.ResumableStreams):
        def dropout(self, x, p, is_shard):
            return super().dropout(x.float(), p, is_shard)

    class OnlySharedSaved(right.ResumableStreams):
        def state_dict(self):
            return {"shared": self.shared.get_state()}

        def load_state_dict(self, state):
            self.shared.set_state(state["shared"])

    class LiveState(right.ResumableStreams):
        """The state is the generators themselves."""

        def state_dict(self):
            return {"shared": self.shared, "own": self.own}

        def load_state_dict(self, state):
            self.shared.set_state(state["shared"].get_state())
            self.own.set_state(state["own"].get_state())

    class SeedsSaved(Seeded):
        def seeds(self, seed, rank, ranks):
            self.seed = 100 * seed
            return self.seed, self.seed + 1 + rank

        def state_dict(self):
            return {"seed": self.seed}

        def load_state_dict(self, state):
            self.shared.manual_seed(state["seed"])

    class FromTime(Seeded):
        """Not reproducible: the seed is of the process."""

        def seeds(self, seed, rank, ranks):
            return 1000 * seed, torch.Generator().seed() % 2**40 + rank


WORDS = {
    "NothingDropped": "wrong_share_kept 100.0%",
    "Default": "default_generator",
    "DefaultSeeded": "default_generator",
    "OneSeedForAll": "masks_equal",
    "OneSeedForAllShards": "masks_equal 1's",
    "DifferentEverywhere": "masks_differ",
    "Exchanged": "masks_differ",
    "SharedIsRankZeros": "masks_equal",
    "SeedPlusRank": "masks_equal",
    "OneRowForAll": "mask_too_coarse",
    "SharedNotReloaded": "state_not_restored",
    "Restarted": "masks_equal continues",
    "NotScaled": "not_scaled",
    "KeptInsteadOfDropped": "wrong_share_kept",
    "InPlace": "changes_input",
    "GradientLost": "wrong_gradient",
    "Promoted": "wrong_dtype",
    "OnlySharedSaved": "state_not_restored",
    "LiveState": "state_not_restored saved",
    "SeedsSaved": "state_not_restored",
    "FromTime": "not_reproducible"}


class Right:
    class FullMaskThenPiece(right.ResumableStreams):
        """One generator: the mask of all ranks' shards is drawn everywhere, and cut."""

        def __init__(self, seed, group):
            self.group, self.generator = group, torch.Generator().manual_seed(seed)

        def dropout(self, x, p, is_shard):
            ranks = dist.get_world_size(self.group) if is_shard else 1
            drawn = torch.rand(ranks, *x.shape, generator=self.generator)
            own = drawn[dist.get_rank(self.group) if is_shard else 0]
            return torch.where(own < p, torch.zeros_like(x), x / (1 - p))

        def state_dict(self):
            return {"generator": self.generator.get_state()}

        def load_state_dict(self, state):
            self.generator.set_state(state["generator"])

    class Counted(right.ResumableStreams):
        """A new generator for each call, seeded by what the call is."""

        def __init__(self, seed, group):
            self.key, self.calls = (seed, dist.get_world_size(group), dist.get_rank(group)), 0

        def dropout(self, x, p, is_shard):
            self.calls += 1
            seed, ranks, rank = self.key
            stream = 1 + rank if is_shard else 0
            generator = torch.Generator().manual_seed(hash((seed, ranks, stream, self.calls)))
            return x * torch.empty(x.shape).bernoulli_(1 - p, generator=generator).to(x) / (1 - p)

        def state_dict(self):
            return {"calls": self.calls}

        def load_state_dict(self, state):
            self.calls = state["calls"]

    class Multiplied(Seeded):
        def seeds(self, seed, rank, ranks):
            return 2**20 * seed, 2**20 * seed + 2718 + rank


def named(answers):
    return {name: answer for name, answer in vars(answers).items() if isinstance(answer, type)}


def test_wrong():
    answers = {name: answer for name, answer in named(Wrong).items() if name in WORDS}
    verdicts = judge_in_one_launch(lab.check_dropout_streams, [(a,) for a in answers.values()], 4)
    for name, verdict in zip(answers, verdicts, strict=True):
        print(name, verdict, sep="\n")
        assert_rejected(verdict, WORDS[name])


def test_streams_at_a_fixed_distance_meet_in_another_replica():
    verdict = lab.check_dropout_streams(Wrong.FixedDistance)
    assert_rejected(verdict, "masks_equal 048")


def test_right():
    answers = [(answer,) for answer in named(Right).values()]
    for ranks in (2, 3):
        verdicts = judge_in_one_launch(lab.check_dropout_streams, answers, ranks)
        assert all(verdict.passed for verdict in verdicts), verdicts
    assert lab.check_dropout_streams(right.ResumableStreams).passed


def test_an_unfilled_answer_is_waited_for():
    assert_waits(lab.check_dropout_streams, "7.8")
