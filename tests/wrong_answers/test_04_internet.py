"""What the checks of notebook 04 must reject, with the words that must say why, and what they must
accept: 4.8, 4.9 and 4.10."""

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from fsdp_answers import accepted, cases, rejected, right
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

import labs.fsdp as lab
from labs.fsdp.loop import MAX_NORM

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules["fsdp_answers"])
pytestmark = pytest.mark.usefixtures("warm_launcher")

WRONG = {}


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
WRONG[lab.check_loop] = [
    (looping("step", "clip"), UNCLIPPED),
    (looping("clip", "step"), "wrong_value"),
    (cleared_once, "wrong_value"),
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


# 4.9 scaled_step


def stepping(scale=2.0**16, divide=True, skip=None, share=1.0, clear="always"):
    """Returns a step. skip(module, loss): whether it is left out; clear: when gradients are."""
    def step(module, optimizer, batch, weight):
        loss = module(**batch).loss * (weight * share * scale)
        loss.backward()
        for parameter in module.parameters():
            parameter.grad.div_(scale if divide else 1)
        skipped = skip is not None and skip(module, loss)
        if not skipped:
            optimizer.step()
        if clear == "always" or clear == "stepped" and not skipped:
            optimizer.zero_grad()
    return step


def total_norm(module):
    return get_total_norm([p.grad for p in module.parameters()]).full_tensor()


def infinite(module, loss):
    return not total_norm(module).isfinite()


def own_infinite(module, loss):
    return not all(p.grad.to_local().isfinite().all() for p in module.parameters())


def infinite_on_all(module, loss):
    found = torch.tensor(float(own_infinite(module, loss)))
    dist.all_reduce(found, op=dist.ReduceOp.MIN)
    return bool(found)


def zeros_for_infinity(module, optimizer, batch, share):
    (module(**batch).loss * share * 65536).backward()
    for parameter in module.parameters():
        parameter.grad.div_(65536).to_local().nan_to_num_(0, 0, 0)
    optimizer.step()
    optimizer.zero_grad()


def share_after_backward(module, optimizer, batch, share, skip=None):
    (module(**batch).loss * 1024).backward()
    for parameter in module.parameters():
        parameter.grad.mul_(share / 1024)
    if skip is None or not skip(module, None):
        optimizer.step()
    optimizer.zero_grad()


def nothing(module, optimizer, batch, share):
    pass


WRONG[lab.check_scaled_step] = [
    (stepping(1.0, skip=infinite), "underflow"),
    (stepping(8.0, skip=infinite), "underflow"),
    (stepping(divide=False, skip=infinite), "not_unscaled"),
    (stepping(), "step_not_skipped"),
    (stepping(skip=lambda module, loss: not loss.isfinite()), "step_not_skipped"),
    (stepping(skip=own_infinite), "step_not_skipped infinite"),
    (stepping(skip=infinite_on_all), "step_not_skipped infinite"),
    (stepping(2.0**30, skip=infinite), "scale_too_large"),
    (stepping(2.0**30), "scale_too_large"),
    (share_after_backward, "step_not_skipped infinite"),
    (stepping(skip=infinite, share=0.5), "not_unscaled 0.5"),
    (stepping(skip=infinite, clear="stepped"), "gradients_left next"),
    (stepping(skip=infinite, clear="never"), "gradients_left behind"),
    (stepping(skip=lambda module, loss: True), "step_skipped"),
    (zeros_for_infinity, "step_not_skipped"),
    (nothing, "step_skipped")]


def test_a_table_of_a_step_says_who_made_it_and_why_the_norm_grew(capsys):
    table = str(lab.try_step(right.found_step))
    assert "who makes the step  ranks 0 and 1  no rank" in table and "norm can grow" in table, table


def by_grad_scaler(module, optimizer, batch, share):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    scaler.scale(module(**batch).loss * share).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def share_after_backward_and_skipped(module, optimizer, batch, share):
    """The same gradients: what counts is that fp16 loses few of them."""
    share_after_backward(module, optimizer, batch, share, skip=infinite)


def with_a_smaller_scale_where_it_overflows(module, optimizer, batch, share):
    scale, left = 2.0**20, 8
    while left:
        (module(**batch).loss * (share * scale)).backward()
        for parameter in module.parameters():
            parameter.grad.div_(scale)
        if not infinite(module, None):
            optimizer.step()
            left = 1
        optimizer.zero_grad()
        scale, left = scale / 256, left - 1


# 4.10 gradient_bytes


def counting(choose, size=lambda call: call.bytes):
    return lambda calls: sum(size(call) for call in calls if choose(call.kind))


WRONG[lab.check_gradient_bytes] = [
    (counting(lambda kind: kind == "all_reduce"), "reduce_scatter_missing"),
    (counting(lambda kind: kind == "reduce_scatter"), "all_reduce_missing"),
    (counting(lambda kind: "reduce" in kind, lambda call: 4 * call.elements),
     "one_size_for_all"),
    (counting(lambda kind: "reduce" in kind, lambda call: 2 * call.elements),
     "one_size_for_all"),
    (counting(lambda kind: kind != "all_reduce"), "all_gather_counted"),
    (counting(lambda kind: True), "all_gather_counted"),
    (counting(lambda kind: kind == "all_gather"), "all_gather_counted"),
    (counting(lambda kind: "reduce" in kind, lambda call: call.elements), "in_elements"),
    (counting(lambda kind: "reduce" in kind, lambda call: 1), "wrong_number"),
    (lambda calls: None, "not_a_number")]

RIGHT = {lab.check_loop: [right.loop, looping("clip", "step", "clear"),
                          looping(clip_by_hand, "step", "clear")],
         lab.check_scaled_step: [right.scaled_step, stepping(2.0**14, skip=infinite),
                                 by_grad_scaler, share_after_backward_and_skipped,
                                 with_a_smaller_scale_where_it_overflows],
         lab.check_gradient_bytes: [
             right.gradient_bytes,
             lambda calls: torch.tensor(counting(lambda kind: "reduce" in kind)(calls))]}


def test_what_is_not_filled_in_is_waited_for(capsys):
    def unfilled(*_, **__):
        raise NotImplementedError("Exercise 4.1")

    for check in (*RIGHT, lab.check_shard, lab.check_cost, lab.check_choose, lab.check_mixed,
                  lab.check_checkpointed, lab.check_from_meta):
        verdict = check(unfilled)
        assert verdict.passed is None, verdict
    assert lab.check_checkpoint(unfilled, unfilled).passed is None


def test_the_loops_found_are_rejected(capsys):
    """Said in the notebook: each piece runs without an error, and is wrong."""
    rejected(lab.check_loop, right.found_loop, "not_clipped")
    rejected(lab.check_scaled_step, right.found_step, "underflow")
    rejected(lab.check_gradient_bytes, right.found_meter, "reduce_scatter_missing")


@pytest.mark.parametrize("check, answer, words", cases(WRONG))
def test_a_wrong_answer_is_rejected_and_told_why(check, answer, words, request, capsys):
    rejected(check, answer, words, request)


@pytest.mark.parametrize("check, answer", cases(RIGHT))
def test_another_right_answer_is_accepted(check, answer, request, capsys):
    accepted(check, answer, request)
