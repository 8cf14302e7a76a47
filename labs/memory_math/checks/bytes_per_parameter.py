"""Exercise 1.2: bytes per parameter by recipe."""

import random

import torch

from labs.exercises.verdicts import check
from labs.memory_math import formula_feedback as feedback
from labs.memory_math.checks import STATES, TABLE_HINT
from labs.memory_math.formula_feedback import Cause


@check("1.2", hints=TABLE_HINT)
def check_bytes_per_parameter(bytes_per_parameter):
    """Three numbers for any types: of weights, gradients and moments, with a master copy or not."""
    feedback.require_signature(bytes_per_parameter, ("weights", "gradients", "moments", "master"))
    for recipe in _recipes():
        what = "weights {}, gradients {}, moments {}, {} master".format(
            *(str(dtype).removeprefix("torch.") for dtype in recipe[:3]),
            "with a" if recipe[3] else "no")
        returned = feedback.finite_numbers(bytes_per_parameter(*recipe), STATES, what)
        for name, got, expected, causes in zip(STATES, returned, _bytes(*recipe),
                                                 _causes(*recipe), strict=True):
            feedback.require_value(got, expected, f"{what}: {name}", "bytes", causes)
    return "right for fp32 and bf16, and for 8-bit, 16-bit and 64-bit types drawn at random"


def _recipes() -> list[tuple]:
    """(weights, gradients, moments, master): those of the notebook, and two of types drawn at
    random, which reject answers that know only fp32 and bf16."""
    dice = random.Random()
    others = [torch.float64, torch.float8_e4m3fn, torch.float16, torch.uint8]
    fp32, bf16 = torch.float32, torch.bfloat16
    return [(fp32, fp32, fp32, False), (bf16, bf16, bf16, False), (bf16, bf16, fp32, False),
            (bf16, bf16, fp32, True), (bf16, fp32, fp32, True),
            *((*dice.sample(others, 3), master) for master in (False, True))]


def _bytes(weights, gradients, moments, master) -> tuple[int, int, int]:
    """Bytes of real tensors: one parameter's weight, its gradient, and two moments with a master
    copy."""
    state = [torch.empty(1, dtype=moments)] * 2 + [torch.empty(1)] * master
    return (torch.empty(1, dtype=weights).nbytes, torch.empty(1, dtype=gradients).nbytes,
            sum(tensor.nbytes for tensor in state))


def _causes(weights, gradients, moments, master) -> tuple[list[Cause], ...]:
    """Those of the weights, of the gradients, and of the optimizer state."""
    moment = moments.itemsize
    return ([Cause(4 * master, "the master copy is counted among the weights",
                   "The optimizer keeps it: it belongs to the optimizer state.")],
            [Cause.returning(weights.itemsize, gradients.itemsize, "that is the weights' type",
                             "Gradients have a type of their own here.")],
            [Cause(-4 * master, "the fp32 master copy is missing", "It takes 4 more bytes."),
             Cause(8 - 2 * moment, "the moments are taken as fp32",
                   f"They are {moment} bytes each here."),
             Cause(2 * weights.itemsize - 2 * moment, "the moments are taken in the weights' "
                   "type", "They have a type of their own."),
             Cause(-moment, "only one moment is counted",
                   "Adam keeps two: mean and mean square."),
             Cause(4 * (not master), "there is no master copy here",
                   "Count one only where `master` is True."),
             Cause((weights.itemsize - 4) * master, "the master copy is taken in the weights' "
                   "type", "It is there to be finer than they are: in fp32."),
             Cause((moment - 4) * master, "the master copy is taken in the moments' type",
                   "A master copy is fp32, whatever the moments are.")])
