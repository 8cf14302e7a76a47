"""How far a right answer may be off the reference: every tolerance for rounding, at one place.

A right answer adds up in another order than the reference, so it is off by rounding and by nothing
else. How much that is was not guessed: tests/checks/test_tolerances.py moves each input by one ulp
up or down, takes the sums in other orders, and looks how far the reference's own result moves. A
constant is at least MARGIN times that, for other devices and versions; and as little more as the
wrong answers in tests/ need to be told from right ones. The comments have what was measured, on a
CPU with torch 2.13. Where a formula is compared with a simulation, what the formula leaves out is
more than rounding: such a tolerance stands beside its formula.
"""

import torch

MARGIN = 4

# Absolute where the numbers are below 1, relative to the largest of them above, unless said
# otherwise; all of float32.

# Gradients of a small model, summed over ranks and micro-batches (1e-7), and its parameters after 6
# steps of AdamW with eps 1e-3 (1e-6; a Llama of 2 layers: 2.4e-6).
SUMS = 1e-5
# A loss is one number that stands for many: it is judged before the parameters, and must not be
# what a difference in them is first seen by.
LOSS = 10 * SUMS
# Gradients beside the largest element of the same tensor, where all are small (1.4e-6).
GRADIENTS = 2e-5
# Parameters of GPT-2 after 6 steps of AdamW with a learning rate of 0.05 (1.3e-5 after 6 steps, ten
# times that of 3): an update has the size of the rate, whatever the gradient's, so what rounding
# does to a small gradient grows from step to step.
TRAINED = 2e-4
# Attention and its gradients: 6e-7 with 9 tokens or 1,024; 7.4e-6 where scores reach 300, because
# exp multiplies what a score is off by with the score's size.
ATTENTION = 3e-5
# Two partial attentions that are merged: a sum of two, in the dtype of the parts.
MERGED = {torch.float32: 2e-5, torch.float64: 1e-12}
# Five steps of Newton-Schulz: each is a product of three matrices, whose rounding the next one
# multiplies by up to 3.4 (3.2e-6).
NEWTON_SCHULZ = 3e-5
# A norm, and the factor of clipping, relative: torch.nn.utils.clip_grad_norm_ adds 1e-6 to the norm
# that it divides by, and an answer may or may not; the smallest norm that is tried is 0.05 (2e-5).
NORM = 1e-4
# A parameter that nothing has changed yet: it was copied, so nothing is added up.
UNCHANGED = 1e-6
# One rounding to bfloat16 is 2^-9 = 0.002, relative; a gradient has several.
BFLOAT16 = 1e-2
# A formula's number that was computed in float32, relative: a few operations of half an ulp each.
FLOAT32 = 1e-6
