"""A block of attention, in one piece and in tiles: against torch's own, with grouped-query heads,
positions in any order, and sizes that no tile divides."""

from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional as F

import labs.tensor_parallel as lab
from labs.tensor_parallel.attention_blocks import CausalMask, in_tiles, recorded_pairs

# batch, query heads, key heads, queries, keys, d
SHAPES = [(1, 4, 4, 10, 10, 8), (2, 6, 2, 33, 70, 5), (2, 6, 3, 130, 70, 16)]


def drawn(batch, heads, kv_heads, queries, keys, d):
    """q, k, v laid out as linear layers leave them, and the positions of queries and of keys."""
    torch.manual_seed(0)
    tensors = [torch.randn(batch, tokens, each, d).transpose(1, 2) for tokens, each in
               ((queries, heads), (keys, kv_heads), (keys, kv_heads))]
    order = torch.randperm(queries + keys)
    return tensors, order[:queries], order[queries:]


@pytest.mark.parametrize("tile", [None, 16, 64])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_torchs_attention(shape, tile):
    tensors, positions, places = drawn(*shape)
    visible = positions[:, None] >= places
    sees = visible.any(1)  # torch's own has NaN where a query sees nothing
    ours, theirs = ([each.clone().requires_grad_() for each in tensors] for _ in range(2))
    want = F.scaled_dot_product_attention(*theirs, visible, enable_gqa=True).nan_to_num(0.0)
    weights = torch.randn_like(want) * sees[:, None]
    want.backward(weights)
    with in_tiles(tile) if tile else nullcontext():
        out = lab.causal_attention(*ours, positions, places)
        out.backward(weights)
    torch.testing.assert_close(out[:, :, sees], want[:, :, sees], rtol=0, atol=1e-5)
    assert not sees.all() and not out[:, :, ~sees].any()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=1e-5)


@pytest.mark.parametrize("tile", [None, 16])
def test_a_mask_by_position_is_the_mask(tile):
    (q, k, v), positions, places = drawn(*SHAPES[1])
    visible = positions[:, None] >= places
    with in_tiles(tile) if tile else nullcontext(), recorded_pairs() as pairs:
        found = [lab.block_attention(q, k, v, mask)
                 for mask in (visible, CausalMask(positions, places))]
    for dense, by_position in zip(*found, strict=True):
        assert torch.equal(dense, by_position)
    assert pairs == [int(visible.sum())] * 2


def test_tiles_end_with_their_block():
    with pytest.raises(ZeroDivisionError), in_tiles(16):
        raise ZeroDivisionError
    tensors, positions, places = drawn(*SHAPES[0])
    with in_tiles(4), in_tiles(64):
        inside = lab.block_attention(*tensors, CausalMask(positions, places))
    outside = lab.block_attention(*tensors, CausalMask(positions, places))
    torch.testing.assert_close(inside, outside)
