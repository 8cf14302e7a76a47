"""What the check of exercise 4.8 must reject, and what it must accept."""

import sys

import cloudpickle
import pytest
import torch.distributed as dist
from answers import assert_waits
from fsdp_answers import accepted, cases, rejected, right
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import labs.fsdp as lab
from labs.fsdp.loop import MAX_NORM

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules["fsdp_answers"])
pytestmark = pytest.mark.usefixtures("warm_launcher")
# 4.8 loop


def looping(*parts):
    """Returns a loop that does these parts for each batch, after its backward: "clear", "clip",
    "step", or a function of (module, optimizer)."""
    def loop(module, optimizer, batches):
        do = {"clear": lambda *_: optimizer.zero_grad(), "step": lambda *_: optimizer.step(),
              "clip": lambda *_: clip_grad_norm_(module.parameters(), MAX_NORM)}
        for batch in batches:
            module(**batch).loss.backward()
            for part in parts:
                do.get(part, part)(module, optimizer)
    return loop


def local_square(module):
    return sum(p.grad.to_local().square().sum() for p in module.parameters())


def scale(module, norm, limit=MAX_NORM):
    for parameter in module.parameters():
        parameter.grad.mul_(min(1.0, limit / float(norm)))


def clip_shards(module, optimizer):
    scale(module, local_square(module).sqrt())


def clip_by_hand(module, optimizer):
    square = local_square(module)
    dist.all_reduce(square)
    scale(module, square.sqrt())


def clip_each(module, optimizer):
    for parameter in module.parameters():
        clip_grad_norm_([parameter], MAX_NORM)


def one_step_for_all(module, optimizer, batches):
    for batch in batches:
        module(**batch).loss.backward()
    clip_grad_norm_(module.parameters(), MAX_NORM)
    optimizer.step()


def cleared_once(module, optimizer, batches):
    optimizer.zero_grad()
    looping("clip", "step")(module, optimizer, batches)


def only_the_first(module, optimizer, batches):
    right.loop(module, optimizer, batches[:1])


# Its size depends on the data, which are texts of the Python that runs this.
UNCLIPPED = "not_clipped"
WRONG = [
    (looping("step", "clip"), UNCLIPPED),
    (looping("clip", "step"), "gradients_not_cleared"),
    (cleared_once, "gradients_not_cleared"),
    (looping("step", "clip", "clear"), UNCLIPPED),
    (looping("step", "clear"), UNCLIPPED),
    (looping("clear", "clip", "step"), "gradient_missing"),
    (looping("clip", "clear", "step"), "gradient_missing"),
    (looping(clip_shards, "step", "clear"), "not_clipped"),
    (looping(clip_each, "step", "clear"), "not_clipped"),
    (looping(lambda m, _: clip_grad_value_(m.parameters(), MAX_NORM), "step", "clear"),
     "not_clipped"),
    (looping(lambda m, _: clip_grad_norm_(m.parameters(), 1.0), "step", "clear"), "not_clipped"),
    (looping(lambda m, _: clip_grad_norm_(m.parameters(), 0.1), "step", "clear"),
     "not_clipped 0.1"),
    (one_step_for_all, "missing_step"),
    (only_the_first, "missing_step"),
    (looping(), "missing_step steps")]
RIGHT = [right.loop, looping("clip", "step", "clear"),
         looping(clip_by_hand, "step", "clear")]


def test_the_loops_found_are_rejected(capsys):
    """Said in the notebook: each piece runs without an error, and is wrong."""
    rejected(lab.check_loop, right.found_loop, "not_clipped")


@pytest.mark.parametrize("check, answer, words", cases(lab.check_loop, WRONG))
def test_a_wrong_answer_is_rejected_and_told_why(check, answer, words, request, capsys):
    rejected(check, answer, words, request)


@pytest.mark.parametrize("check, answer", cases(lab.check_loop, RIGHT))
def test_another_right_answer_is_accepted(check, answer, request, capsys):
    accepted(check, answer, request)


def test_an_unfilled_exercise_waits(capsys):
    assert_waits(lab.check_loop, "4.8")
