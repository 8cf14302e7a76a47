"""What the check of exercise 9.9 must reject and accept; its formula against real collectives."""

import sys
from fractions import Fraction

import cloudpickle
import pytest
import torch
from _build.definitions import definitions
from answers import assert_rejected, assert_waits, named
from torch import nn
from torch.distributed.fsdp import fully_shard

import labs.mixture_of_experts as lab
from labs.checks.verdicts import Verdict
from labs.meters.traffic import Traffic
from labs.mixture_of_experts import layer_bytes as room
from labs.workers.launcher import launch

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("warm_launcher")
right = definitions("09_mixture_of_experts").layer_bytes


def of(**changes):
    """The right answer for other arguments: name=function of all of them."""
    def answer(*given):
        layer = room.Layer(*given)
        return right(*layer._replace(**{name: change(layer) for name, change in changes.items()}))
    return answer


def scaled(parameters=lambda layer: 1, rows=lambda layer: 1):
    """The right answer, each number times a function of the arguments."""
    def answer(*given):
        layer = room.Layer(*given)
        one, other = right(*layer)
        return one * parameters(layer), other * rows(layer)
    return answer


def replicas(layer):
    return layer.ranks // layer.expert


def table(*given):
    known = {layer: right(*layer) for _, layer in room._cases(room.new_generator())}
    return known.get(room.Layer(*given), (0, 0))


def whole_rows(parameters, hidden, k, tokens, ranks, expert):
    return right(parameters, hidden, k, tokens, ranks, expert)[0], 8 * k * tokens * hidden


def own_shard_too(parameters, hidden, k, tokens, ranks, expert):
    return 6 * parameters / expert, right(parameters, hidden, k, tokens, ranks, expert)[1]


def over_all_ranks(parameters, hidden, k, tokens, ranks, expert):
    return (6 * parameters / expert * (ranks - 1) / ranks,
            right(parameters, hidden, k, tokens, ranks, expert)[1])


def rows_over_all_ranks(parameters, hidden, k, tokens, ranks, expert):
    return (right(parameters, hidden, k, tokens, ranks, expert)[0],
            8 * k * tokens * hidden * (ranks - 1) / ranks)


def nothing_without_groups(*given):
    return right(*given) if room.Layer(*given).expert > 1 else (0, 0)


def sent_without_groups(*given):
    layer = room.Layer(*given)
    rows = 8 * layer.k * layer.tokens * layer.hidden
    return (right(*given)[0], rows) if layer.expert == 1 else right(*given)


WRONG = named(
    # no known mistake is named that an earlier case contradicts
    nothing_without_groups=(nothing_without_groups, "wrong_number"),
    sent_without_groups=(sent_without_groups, "always_sent"),
    arguments=(lambda *given: given[:2], "wrong_number"),
    zeros=(lambda *given: (0, 0), "wrong_number"),
    nothing=(lambda *given: None, "wrong_count"),
    the_sum=(lambda *given: sum(right(*given)), "wrong_count"),
    table=(table, "wrong_number"),
    swapped=(lambda *given: right(*given)[::-1], "swapped"),
    own_shard=(own_shard_too, "own_shard_received"),
    gathered_once=(scaled(lambda layer: 2 / 3), "gathered_once"),
    no_gradients=(scaled(lambda layer: 1 / 3), "no_gradients"),
    all_reduced=(scaled(lambda layer: 4 / 3), "gradients_all_reduced"),
    all_experts=(scaled(lambda layer: layer.expert), "all_experts_gathered"),
    over_all_ranks=(over_all_ranks, "sharded_over_all_ranks"),
    four_bytes=(scaled(lambda layer: 2, lambda layer: 2), "four_bytes"),
    numbers=(scaled(lambda layer: 0.5, lambda layer: 0.5), "elements"),
    all_ranks=(scaled(lambda layer: layer.ranks, lambda layer: layer.ranks),
               "all_ranks_together"),
    rounded=(of(parameters=lambda layer: layer.parameters // 1000 * 1000), "wrong_number"),
    one_all_to_all=(scaled(rows=lambda layer: 1 / 4), "one_all_to_all"),
    only_forward=(scaled(rows=lambda layer: 1 / 2), "only_forward"),
    one_copy=(of(k=lambda layer: 1), "one_copy"),
    own_rows=(whole_rows, "own_rows_received"),
    rows_over_all_ranks=(rows_over_all_ranks, "over_all_ranks"),
    rows_of_all_ranks=(scaled(rows=lambda layer: layer.expert), "other_ranks_too"),
    replicas_as_groups=(of(expert=replicas), "wrong_number"),
    ignores_expert=(of(expert=lambda layer: 1), "wrong_number"))


@pytest.mark.parametrize("answer, code", WRONG)
def test_wrong_answers(answer, code):
    assert_rejected(lab.check_layer_bytes(answer), code)


def by_collective(parameters, hidden, k, tokens, ranks, expert):
    """Collective after collective, in numbers."""
    mine, copies = Fraction(parameters, expert), k * tokens
    from_replicas = mine - mine / (ranks // expert)
    from_group = Fraction(copies * hidden * (expert - 1), expert)
    return float(2 * sum([from_replicas] * 3)), float(2 * sum([from_group] * 4))


def in_tensors(parameters, hidden, k, tokens, ranks, expert):
    replicas = torch.tensor(ranks // expert, dtype=torch.float64)
    return [6 * parameters / expert * (1 - 1 / replicas),
            8 * k * tokens * hidden * (1 - torch.tensor(1 / expert, dtype=torch.float64))]


@pytest.mark.parametrize("answer", [right, by_collective, in_tensors])
def test_right_answers(answer):
    for _ in range(3):
        verdict = lab.check_layer_bytes(answer)
        assert verdict.passed, verdict


def test_an_unfilled_gap_waits():
    assert_waits(lab.check_layer_bytes, "9.9")


@pytest.mark.parametrize("ranks", [4, 8])
def test_the_formula_is_what_fsdp2_and_all_to_alls_receive(ranks):
    """In 4-byte numbers, so twice; exact, for every size of group."""
    found = room.measured_layer(ranks)
    assert [*found] == [size for size in (1, 2, 4, 8) if size <= ranks]
    for expert, own in found.items():
        layer = room._MEASURED._replace(ranks=ranks, expert=expert)
        assert (own.parameters, own.rows) == pytest.approx([2 * each for each in right(*layer)])
        assert room.received(layer) == pytest.approx(right(*layer))
    text = repr(lab.show_measured_bytes(right))
    assert "241,920    241,920" in text and "43,008     43,008" in text


def gathered(experts):
    """(numbers of its shard, numbers that each collective gathers or reduces) of a layer's experts
    in one tensor."""
    class Stacked(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(experts, 6, 4))

        def forward(self, x):
            return (self.weight * x).sum()

    module = fully_shard(Stacked(), reshard_after_forward=True)
    with Traffic() as traffic:
        module(torch.ones(())).backward()
    return module.weight.to_local().numel(), [call.elements for call in traffic.calls]


def test_fsdp2_pads_fewer_experts_than_ranks():
    """What --exact counts, and 9.8 says: 2 experts on 4 ranks are gathered as 4."""
    found = launch(gathered, 2, ranks=4, quiet=True)
    assert [own for own, _ in found] == [24, 24, 0, 0]
    assert all(numbers == [96, 96, 96] for _, numbers in found)


def test_the_lines_cross_where_the_notebook_says():
    picture = lab.show_layer_bytes(right)
    assert picture.text.startswith("With 8,192 tokens a rank, sending is less: the lines cross at "
                                   "28,000 to 147,000 tokens")
    # 6 bytes of each parameter against 8·k·hidden bytes of a token, for any size of group
    for name, tokens in picture.data.items():
        shape = room.shape_named(name)
        layer = room._layer(shape, 1, 64, 1)
        assert tokens == pytest.approx(6 * layer.parameters / (8 * layer.k * layer.hidden))
    assert "DeepSeek-V3: EP 1 66.6 GB, EP 8 10.7 GB, EP 64 3.7 GB" in picture.text
    assert "Mixtral-8x7B: EP 1 8.32 GB, EP 8 1.39 GB with" in picture.text
    assert picture.png()


def test_the_picture_of_a_wrong_answer_is_a_verdict():
    found = lab.show_layer_bytes(lambda *given: (1, 0))
    assert isinstance(found, Verdict) and found.passed is False
