"""What an optimizer keeps for each parameter, and what its step needs temporarily. In bytes.

Sources: torch 2.13, optim/adam.py (_multi_tensor_adam takes the square root of all second moments
at once, _single_tensor_adam of one parameter's, _fused_adam of none) and optim/sgd.py; Dettmers et
al., "8-bit Optimizers via Block-wise Quantization", 2022 (arXiv 2110.02861), section 2: one fp32
scale for each block of a moment; bitsandbytes since 0.44 takes blocks of 256.
"""

from dataclasses import dataclass

BLOCK = 256  # elements of a moment that share a scale


@dataclass(frozen=True)
class Optimizer:
    """state: bytes kept for each parameter that is updated in fp32. temporary: bytes for each
    parameter that a step allocates and frees. largest: the same, for each parameter of the largest
    tensor alone."""

    name: str
    state: float
    temporary: float = 0
    largest: float = 0


OPTIMIZERS = {optimizer.name: optimizer for optimizer in (
    Optimizer("AdamW, foreach", 8, temporary=4),
    # the square root and the quotient of one tensor, and still the quotient of the one before
    Optimizer("AdamW, one by one", 8, largest=12),
    Optimizer("AdamW, fused", 8),
    Optimizer("AdamW, 8 bits", 2 * (1 + 4 / BLOCK)),
    Optimizer("SGD with momentum", 4),
    Optimizer("SGD", 0),
)}
"""Name -> Optimizer. AdamW is foreach by default on a GPU and one by one on a CPU."""
