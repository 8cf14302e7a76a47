"""A bit of a tensor that flips, as in memory or in a computation that went wrong."""

import torch

from labs.training import models


def flip_bit(tensor: torch.Tensor, index: int, bit: int) -> None:
    """Flips one bit of one element, in place. index: of the flattened tensor; of a DTensor, of this
    rank's shard. bit: 0 is the lowest; the sign is the highest, 31 in float32."""
    local = models.local_shard(tensor.detach())
    bits = local.view(_INTEGERS[local.element_size()])
    # `bits` may be strided, as a view of a flat parameter is: an index for each dimension, no
    # view(-1).
    place = torch.unravel_index(torch.tensor(index), local.shape) if local.dim() else ()
    width = 8 * local.element_size()
    # the highest bit alone is the lowest negative number
    bits[place] ^= 1 << bit if bit < width - 1 or width == 8 else -(1 << bit)


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
