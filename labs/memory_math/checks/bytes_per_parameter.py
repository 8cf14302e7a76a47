"""Exercise 1.2: bytes per parameter by recipe."""

import random

import torch

from labs.exercises.numbers import Cause, judge_number, pairs, require_numbers, require_signature
from labs.exercises.verdicts import check
from labs.memory_math.checks import STATES, TABLE_HINT


@check("1.2", hints=TABLE_HINT)
def check_bytes_per_parameter(bytes_per_parameter):
    """Three numbers for any types: of weights, gradients and moments, with a master copy or not."""
    require_signature(bytes_per_parameter, ("weights", "gradients", "moments", "master"))
    for recipe in _recipes():
        what = "weights {}, gradients {}, moments {}, {} master".format(
            *(str(dtype).removeprefix("torch.") for dtype in recipe[:3]),
            "with a" if recipe[3] else "no")
        returned = require_numbers(bytes_per_parameter(*recipe), STATES, what)
        real = _bytes(*recipe)
        for name, got, want, causes in zip(STATES, returned, real, _causes(*recipe, *real),
                                           strict=True):
            judge_number(got, want, causes, f"{what}: {name}", "bytes")
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


def _causes(weights, gradients, moments, master, parameter, gradient,
            state) -> tuple[list[Cause], ...]:
    """Those of the weights, of the gradients, and of the optimizer state. parameter, gradient,
    state: the right bytes of each."""
    moment, copy = moments.itemsize, 4 * master
    of_state = [
        (state - copy, "the fp32 master copy is missing", "It takes 4 more bytes."),
        (8 + copy, "the moments are taken as fp32", f"They are {moment} bytes each here."),
        (2 * parameter + copy, "the moments are taken in the weights' type",
         "They have a type of their own."),
        (state - moment, "only one moment is counted", "Adam keeps two: mean and mean square."),
        (2 * moment + 4, "there is no master copy here", "Count one only where `master` is True."),
        (2 * moment + parameter * master, "the master copy is taken in the weights' type",
         "It is there to be finer than they are: in fp32."),
        (2 * moment + moment * master, "the master copy is taken in the moments' type",
         "A master copy is fp32, whatever the moments are.")]
    return ([(parameter + copy, "the master copy is counted among the weights",
              "The optimizer keeps it: it belongs to the optimizer state.")],
            [(parameter, "that is the weights' type", "Gradients have a type of their own here.")],
            of_state + pairs(of_state, state))
