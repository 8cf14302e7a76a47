"""Exercise 4.9: a step in fp16 with a scaled loss, on shards."""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from labs.checks.on_ranks import on_ranks, raise_on_all_ranks
from labs.checks.verdicts import Wrong, check, shows
from labs.fsdp import scaffold, strategy_checks
from labs.pictures.tables import Table
from labs.training import models
from labs.words import named_ranks
from labs.workers import devices
from labs.workers.launcher import launch

RANKS = 2
SHARE = scaffold.MICRO_BATCH / scaffold.BATCH  # of a micro-batch in the whole batch
TOO_LARGE = 1e9  # a share whose gradients fp16 cannot hold, whatever the scale
LOST = 0.01  # share of the gradients: fewer may be zero
APART = 0.05  # relative: of the gradients' norm and that in fp32


@check("4.9")
def check_scaled_step(scaled_step: Callable) -> str:
    """scaled_step(module, optimizer, batch, share): one step of a module that computes in fp16. Its
    loss counts `share` of the whole batch's; gradients reach the optimizer unscaled, and a step
    with a gradient that is not finite, on any rank, is skipped on all."""
    lost = max(on_ranks(_judge_steps, scaled_step, world_sizes=(RANKS,)))
    return (f"{lost:.2%} of the gradients are lost, the optimizer gets them unscaled, and a step "
            "that is not finite on one rank is skipped on all")


def _judge_steps(scaled_step) -> float:
    torch.set_num_threads(1)
    exact = _step(_plain_step, None, SHARE)
    found = _step(scaled_step, torch.float16, SHARE)
    lost = raise_on_all_ranks(_judge_gradients, exact, found)
    raise_on_all_ranks(_judge_overflow, exact, _step(scaled_step, torch.float16, TOO_LARGE))
    raise_on_all_ranks(_judge_skipped, _step(scaled_step, torch.float16, SHARE, poisoned=True),
                       "a gradient on the last rank is infinite")
    return lost


def _plain_step(module, optimizer, batch, share):
    (module(**batch).loss * share).backward()
    optimizer.step()


class _Found:
    """What one step did on a rank: gradients as the optimizer got them, None where it made no step;
    infinite: share of all ranks' gradients that were not finite right after backward; whether it
    changed parameters; left: whether gradients are left behind."""

    gradients: list | None = None
    infinite = 0.0
    changed = False
    left = False


def _step(step, dtype, share, poisoned=False) -> _Found:
    found = _Found()
    module, optimizer = scaffold.shard_mixed(
        models.move_to_rank(models.gpt2(2, 64, 4, scaffold.CONTEXT)), torch.optim.SGD,
        param_dtype=dtype, reduce_dtype=torch.float32, lr=1.0)
    parameters = list(module.parameters())
    if poisoned:
        parameters[-1].register_post_accumulate_grad_hook(_poison)
    infinite = torch.zeros(len(parameters), device=devices.device())
    for number, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(partial(_count_infinite, infinite, number))
    optimizer.register_step_pre_hook(lambda *_: setattr(found, "gradients", [
        p.grad.to_local().clone() for p in parameters]))
    before = [p.to_local().detach().clone() for p in parameters]
    [batch] = strategy_checks.batches(1, scaffold.MICRO_BATCH // scaffold.CONTEXT, scaffold.CONTEXT,
                              seed=dist.get_rank())
    step(module, optimizer, batch, share)
    dist.all_reduce(infinite)
    found.infinite = infinite.sum().item() / sum(p.numel() for p in parameters)
    found.changed = not all(torch.equal(p.to_local(), old)
                            for p, old in zip(parameters, before, strict=True))
    found.left = any(p.grad is not None and p.grad.to_local().any() for p in parameters)
    return found


@shows("4.9")
def show_step(step: Callable) -> Table:
    """Returns a table of what a step in fp16 does: gradients that are lost, the size of those that
    the optimizer gets, and whether it is made where a gradient is infinite on one rank."""
    by_rank = launch(_try, step, ranks=RANKS, quiet=True)
    lost, ratio, _ = by_rank[0]
    made = [rank for rank, (_, _, stepped) in enumerate(by_rank) if stepped]
    rows = [("gradients that are zero, and not in fp32", f"{lost:.1%}", "0%"),
            ("norm of all gradients, divided by the norm in fp32", f"{ratio:.3g}", "1"),
            ("a gradient is infinite on one rank: who makes the step",
             named_ranks(made) if made else "no rank", "no rank")]
    return Table(f"One step in fp16 on {RANKS} ranks", ("", "here", "wanted"), rows,
                 note="Near fp16's smallest number, 6e-8, gradients are rounded to multiples of "
                      "it: below half of it to zero, above to as much as twice their size. So the "
                      "norm can grow while gradients are lost." if lost > LOST else "")


def _try(step) -> tuple[float, float, bool]:
    torch.set_num_threads(1)
    exact, found = _step(_plain_step, None, SHARE), _step(step, torch.float16, SHARE)
    poisoned = _step(step, torch.float16, SHARE, poisoned=True)
    if found.gradients is None:
        return 1.0, 0.0, poisoned.changed
    return *_compared(exact, found), poisoned.changed


def _compared(exact, found) -> tuple[float, float]:
    """Returns (share of the gradients that are zero only in `found`, ratio of the norms)."""
    total = sum(int((g != 0).sum()) for g in exact.gradients)
    zeros = sum(int(((e != 0) & (g == 0)).sum())
                for e, g in zip(exact.gradients, found.gradients, strict=True))
    norms = [sum(g.double().square().sum() for g in one.gradients).sqrt().item()
             for one in (found, exact)]
    return zeros / total, norms[0] / norms[1]


def _count_infinite(counts, number, parameter):
    counts[number] = (~parameter.grad.to_local().isfinite()).sum()


def _poison(parameter):
    if dist.get_rank() == dist.get_world_size() - 1:
        parameter.grad.to_local().fill_(float("inf"))


def _judge_gradients(exact, found) -> float:
    rank = f"rank {dist.get_rank()}"
    # A scale that is too large makes gradients infinite that are finite in fp32: without a step
    # nothing is trained, and with it the parameters are lost.
    if found.infinite:
        which = "every gradient is" if found.infinite > 0.99 else \
            f"{found.infinite:.2%} of the gradients are"
        raise Wrong(f"{which} infinite with your scale: fp16's largest number is "
                    f"{torch.finfo(torch.float16).max:,.0f}", "Take a smaller scale.",
                    code="scale_too_large")
    if found.gradients is None:
        raise Wrong(f"{rank}: no gradient is infinite, and the optimizer made no step",
                    "Where all gradients are finite on all ranks: optimizer.step().",
                    code="step_skipped")
    # The loss is scaled: gradients that fp16 cannot hold are zero otherwise.
    lost, ratio = _compared(exact, found)
    if lost > LOST:
        raise Wrong(f"{rank}: {lost:.1%} of the gradients are zero and should not be: "
                    "they are below fp16's smallest number",
                    "Multiply the loss by a large number before backward, such as 65,536.",
                    code="underflow")
    # And the gradients are divided again: otherwise a step is as many times too long.
    if not abs(ratio - 1) <= APART:
        raise Wrong(f"{rank}: the optimizer gets gradients that are {ratio:.4g} times those in "
                    "fp32", "Divide each gradient by the scale after backward, once; and the loss "
                    "counts `share`.", code="not_unscaled")
    if found.left:
        raise Wrong(f"{rank}: gradients are left behind after the step",
                    "optimizer.zero_grad() after each step.", code="gradients_left")
    return lost


def _judge_overflow(exact, found):
    # An answer that multiplies by `share` after backward, or takes a smaller scale where gradients
    # overflow, has finite gradients here: then they must be right, and the step may be made.
    if found.gradients is not None:
        norm = _compared(exact, found)[1] * SHARE / TOO_LARGE
        if abs(norm - 1) <= APART:
            return
    _judge_skipped(found, "every gradient overflows" if found.infinite else
                   f"with a share of {TOO_LARGE:g} gradients reach the optimizer at another size")


def _judge_skipped(found, what):
    rank = f"rank {dist.get_rank()}"
    # Infinity minus infinity is not a number, and stays: a step with it ends the training. Each
    # rank sees its own shards only, so the ranks must agree, or their models come apart.
    if found.changed or found.gradients is not None:
        raise Wrong(f"{rank}: {what}, and the optimizer made its step",
                    "Skip the step if a gradient is not finite on any rank: a rank sees its own "
                    "shards only, so all-reduce what each found.", code="step_not_skipped")
    if found.left:
        raise Wrong(f"{rank}: {what}, and these gradients are left for the next step",
                    "optimizer.zero_grad() also after a step that is skipped.",
                    code="gradients_left")
