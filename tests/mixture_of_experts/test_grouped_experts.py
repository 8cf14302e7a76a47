"""Experts without a loop that exercise 9.11 must reject, and right ones written differently."""

import pytest
import torch
import torch.nn.functional as F
from _build.definitions import definitions
from answers import assert_rejected, assert_waits
from torch import nn

from labs.mixture_of_experts.grouped_experts import check_grouped_experts
from labs.training.mixtures import gated_mlp


def module(forward):
    """A class of experts with this forward."""
    class Experts(nn.Module):
        def __init__(self, gate_up, down):
            super().__init__()
            self.gate_up, self.down = nn.Parameter(gate_up), nn.Parameter(down)

    Experts.forward = forward
    return Experts


def grouped(self, copies, counts, end=lambda counts: counts.cumsum(0), act=F.silu, swap=False,
            read=lambda parameter: parameter):
    ends = end(torch.tensor(counts)).to(torch.int32)
    gate, up = F.grouped_mm(copies, read(self.gate_up).transpose(1, 2), offs=ends).chunk(2, dim=-1)
    gate, up = (up, gate) if swap else (gate, up)
    return F.grouped_mm(act(gate) * up, read(self.down).transpose(1, 2), offs=ends)


def variant(**changes):
    return module(lambda self, copies, counts: grouped(self, copies, counts, **changes))


def loop(self, copies, counts):
    return torch.cat([gated_mlp(*each) for each in zip(
        copies.split(counts), self.gate_up, self.down, strict=True)])


def expert_of(counts):
    return torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))


def matrix_of_each_copy(self, copies, counts):
    which = expert_of(counts)
    gate, up = torch.einsum("nh,nfh->nf", copies, self.gate_up[which]).chunk(2, dim=-1)
    return torch.einsum("nf,nhf->nh", F.silu(gate) * up, self.down[which])


def all_experts(self, copies, counts):
    gate, up = torch.einsum("nh,efh->enf", copies, self.gate_up).chunk(2, dim=-1)
    every = torch.einsum("enf,ehf->enh", F.silu(gate) * up, self.down)
    return every[expert_of(counts), torch.arange(len(copies))]


def padded(self, copies, counts, capacity=lambda counts: max(counts)):
    experts, size = len(counts), capacity(counts)
    which = expert_of(counts)
    starts = torch.tensor(counts).cumsum(0) - torch.tensor(counts)
    place = torch.arange(len(copies)) - starts[which]
    kept = place < size
    index = which[kept], place[kept]
    blocks = copies.new_zeros(experts, size, copies.shape[1]).index_put(index, copies[kept])
    gate, up = torch.bmm(blocks, self.gate_up.transpose(1, 2)).chunk(2, dim=-1)
    outputs = torch.bmm(F.silu(gate) * up, self.down.transpose(1, 2))
    return torch.zeros_like(copies).index_put((torch.where(kept)[0],), outputs[index])


def in_place(self, copies, counts):
    outputs = grouped(self, copies, counts)
    with torch.no_grad():
        copies.mul_(2)
    return outputs


def reversed_experts(self, copies, counts):
    ends = torch.tensor(counts[::-1]).cumsum(0).to(torch.int32)
    gate_up, down = self.gate_up.flip(0).transpose(1, 2), self.down.flip(0).transpose(1, 2)
    gate, up = F.grouped_mm(copies, gate_up, offs=ends).chunk(2, dim=-1)
    return F.grouped_mm(F.silu(gate) * up, down, offs=ends)


def no_gradient_of_copies(self, copies, counts):
    return grouped(self, copies.detach(), counts)


WRONG = {
    "the loop": (module(loop), "loops_over_experts"),
    "a loop over blocks": (module(lambda self, copies, counts: torch.cat(
        [gated_mlp(part, self.gate_up[i], self.down[i])
         for i, part in enumerate(copies.split(counts))])), "loops_over_experts"),
    "returns its argument": (module(lambda self, copies, counts: copies), "wrong_outputs"),
    "zeros": (module(lambda self, copies, counts: torch.zeros_like(copies)), "wrong_outputs"),
    "returns nothing": (module(lambda self, copies, counts: None), "wrong_type"),
    "a matrix for each copy": (module(matrix_of_each_copy), "too_large"),
    "all experts for all copies": (module(all_experts), "too_large"),
    "the first expert for all": (module(lambda self, copies, counts: gated_mlp(
        copies, self.gate_up[0], self.down[0])), "rows_of_other_experts"),
    "drops above the mean": (module(lambda self, copies, counts: padded(
        self, copies, counts, lambda counts: -(-sum(counts) // len(counts)))),
        "rows_of_other_experts"),
    "equal blocks": (variant(end=lambda counts: (torch.arange(len(counts)) + 1)
                             * counts.sum() // len(counts)), "rows_of_other_experts"),
    "gate and up exchanged": (variant(swap=True), "gate_and_up"),
    "experts in the opposite order": (module(reversed_experts), "wrong_order"),
    "without silu": (variant(act=lambda gate: gate), "wrong_outputs"),
    "relu": (variant(act=F.relu), "wrong_outputs|rows_of_other_experts"),
    "matrices detached": (variant(read=lambda parameter: parameter.detach()), "gradient_missing"),
    "copies detached": (module(no_gradient_of_copies), "gradient_missing copies"),
    "changes its input": (module(in_place), "input_changed"),
    "always fp32": (module(lambda self, copies, counts: loop(self, copies, counts).float()),
                    "wrong_shape bfloat16"),
}
RIGHT = {
    "solution": definitions("09_mixture_of_experts").GroupedExperts,
    "grouped_mm": variant(),
    "padded to the largest count": module(padded),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_is_rejected(name):
    answer, expected = WRONG[name]
    assert_rejected(check_grouped_experts(answer), expected)


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_answer_passes(name):
    for _ in range(5):
        verdict = check_grouped_experts(RIGHT[name])
        assert verdict.passed, str(verdict)


def test_it_waits_for_an_untouched_gap():
    def unfilled(*_):
        raise NotImplementedError("Exercise 9.11")

    verdict = check_grouped_experts(module(unfilled))
    assert verdict.passed is None and "9.11" in str(verdict)
    assert_waits(check_grouped_experts, "9.11")
