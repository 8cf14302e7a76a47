"""Exercise 7.20: clipping by the norm of all stages, with an embedding that two of them have."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist

from labs.checks.numbers import Cause, as_number, judge_number
from labs.checks.on_ranks import on_ranks, raise_on_all_ranks
from labs.checks.tolerances import NORM
from labs.checks.verdicts import Wrong, check, kind_of
from labs.meters.traffic import Traffic, numbers_sent
from labs.pipeline_parallel.one_process import Case, OneProcess, draw_micro_batches
from labs.pipeline_parallel.runner import PipelineRunner
from labs.pipeline_parallel.stages import Stage, tied_group, tied_parameter
from labs.predictions.pipelines.schedules import one_f_one_b

STEPS = 5
LIMITS = (0.05, 1e6)  # the norm is clipped, and left alone
SGD = {"lr": 0.3, "momentum": 0.9}
_MAX_NUMBERS = 32  # numbers that may be sent beside the tied gradient: a norm


@check("7.20")
def check_clip_across_stages(clip_across_stages: Callable):
    """clip_across_stages(parameters, tied, max_norm, group, tied_group): sums the gradients of the
    tied parameter over its two ranks, scales all gradients so that the norm over all stages is at
    most max_norm; returns the norm from before."""
    on_ranks(_try, clip_across_stages)
    return (f"{STEPS} steps of a Llama with a tied embedding equal the reference's on 2, 3 and 4 "
            "ranks, also of two pipelines side by side; each shared gradient is summed and counted "
            "once, and the two copies stay equal")


@dataclass(frozen=True)
class _Own:
    """What a rank has: its parameters, and of these the tied one, or None. squares: of all its
    gradients. tied_here: the tied gradient as its own backward left it."""

    parameters: list[torch.nn.Parameter]
    tied: torch.nn.Parameter | None
    squares: float
    tied_here: torch.Tensor | None


def _try(clip_across_stages):
    pipeline = dist.group.WORLD
    _train(clip_across_stages, pipeline, tied_group(pipeline), STEPS)
    if dist.get_world_size() == 4:
        # Two pipelines with data of their own: a pipeline is not the job, and rank 0 not its first.
        # For each pipeline one group of its ranks and one of its first and last; all ranks make
        # all.
        made = [[dist.new_group(ranks) for _ in range(2)] for ranks in ([0, 2], [1, 3])]
        _train(clip_across_stages, *made[dist.get_rank() % 2], 2, seed=100 * (dist.get_rank() % 2))


def _train(clip_across_stages, group, both, steps, seed=0):
    """Trains this rank's pipeline, the ranks of `group`. both: its first and its last rank."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    case = Case("1F1B", one_f_one_b(ranks, 3), (2, *(1,) * (ranks - 1)))
    model = case.model(tied=True)
    stages = case.stages(model, rank)
    parameters = list(chain(*(stage.parameters() for stage in stages.values())))
    optimizer = torch.optim.SGD(parameters, **SGD)
    reference = OneProcess(model, torch.optim.SGD, **SGD)
    runner = PipelineRunner(case.schedule, stages, group=group, recorded=False)
    unused = torch.nn.Parameter(torch.ones(3))  # without a gradient, as a frozen one
    for number in range(steps):
        batches = draw_micro_batches(case.schedule.micro_batches, seed=seed + number)
        limit = LIMITS[number % 2]
        reference.differentiate(batches)
        runner.step(batches)
        # Before the call, which scales in place.
        own = _own(parameters, stages)
        with Traffic() as traffic:
            norm = clip_across_stages([*parameters, unused], own.tied, limit, group, both)
        _judge_step(norm, own, traffic, reference, stages, limit, number, group)
        optimizer.step()
        optimizer.zero_grad()
        reference.update(limit)


def _own(parameters, stages) -> _Own:
    tied = tied_parameter(stages)
    squares = sum(p.grad.square().sum().item() for p in parameters)
    return _Own(parameters, tied, squares, None if tied is None else tied.grad.clone())


def _judge_step(norm, own, traffic, reference, stages, limit, number, group):
    members = dist.get_process_group_ranks(group)
    by_rank: list = [None] * len(members)
    dist.all_gather_object(by_rank, (own.squares, own.tied_here), group=group)
    where = f"rank {dist.get_rank()}, step {number + 1}, max_norm {limit:g}"
    if len(members) < dist.get_world_size():
        where += f", in the pipeline of ranks {' and '.join(map(str, members))}"
    norms: list = [None] * dist.get_world_size()
    dist.all_gather_object(norms, _norm(reference.gradients.values()))
    # Each rank of a pipeline has contributed that pipeline's norm, so each counts len(members)
    # times.
    job = (sum(each**2 for each in norms) / len(members))**0.5
    raise_on_all_ranks(_judge_traffic, traffic, own, where)
    raise_on_all_ranks(_judge_norm, norm, own, by_rank, reference, limit, where, job)
    raise_on_all_ranks(_judge_gradients, norm, own, by_rank, reference, stages, limit, where)


def _judge_traffic(traffic, own, where):
    # One number for the norm, and on two ranks the tied gradient once: gathering gradients would
    # send the whole model.
    most = _MAX_NUMBERS + (0 if own.tied is None else own.tied.numel())
    sent = numbers_sent(traffic.calls)
    if sent > most:
        needed = "one number" if own.tied is None else "the tied gradient once, and one number"
        raise Wrong(f"{where}: it communicates {sent:,.0f} numbers; what is needed is {needed}",
                    "Squares add up: all-reduce the sum of the squares, not the gradients.",
                    code="too_much_sent")


def _judge_norm(norm, own, by_rank, reference, limit, where, job):
    """job: the norm over all pipelines of the job."""
    if as_number(norm) is None:
        raise Wrong(f"{where}: it returned {kind_of(norm)}, not the norm",
                    "As torch.nn.utils.clip_grad_norm_, return the norm from before the clipping.",
                    code="wrong_type")
    # The invariant: the norm is that of one process, in which the tied embedding is one parameter
    # whose gradient is the sum of both uses, counted once.
    whole = _norm(reference.gradients.values())
    first, last = by_rank[0][1], by_rank[-1][1]
    rest = sum(squares for squares, _ in by_rank)  # with the tied gradients as they were, unsummed
    tied = (first + last).square().sum().item()
    each = [first.square().sum().item(), last.square().sum().item()]
    causes = [
        *(Cause("one_tied_gradient", (rest - one)**0.5,
                "the norm with the gradient of only one of the tied embedding's two uses",
                "Sum its two gradients over `tied_group` first.") for one in each),
        Cause("norm_own_stages_alone", own.squares**0.5, "the norm of its own stages alone",
              "Sum the squares over the ranks."),
        Cause("norm_tied_gradient_counted_twice", (whole**2 + tied)**0.5,
              "the norm with the tied gradient counted twice",
              "Two ranks have the tied gradient; only one of them may add its squares."),
        Cause("tied_gradients_apart", rest**0.5,
              "the norm with the tied embedding's two gradients apart",
              "It is one parameter: add its two gradients first, then square."),
        Cause("norm_without_tied_gradient", (rest - sum(each))**0.5,
              "the norm without the tied gradient", "One rank counts it."),
        Cause("tied_gradient_summed_twice", (whole**2 - tied + 4 * tied)**0.5,
              "the norm with a tied gradient that was summed once too often",
              "Sum its two gradients over the two ranks once."),
        Cause("tied_gradients_averaged", (whole**2 - tied + tied / 4)**0.5,
              "the norm with the mean of the tied gradients",
              "Both uses of one parameter add to its gradient: sum, not mean."),
        Cause("sum_ranks_norms", sum(squares**0.5 for squares, _ in by_rank),
              "the sum of the ranks' norms", "Norms do not add up, their squares do."),
        Cause("square", whole**2, "its square", "Take the root after the sum."),
        Cause("norm_after_clipping", min(whole, limit), "the norm after the clipping",
              "Return the one from before."),
        Cause("norm_over_all_pipelines_job", job, "the norm over all pipelines of the job",
              "Sum over `group`, the ranks of one pipeline: what is not said is all ranks.")]
    judge_number(norm, whole, causes, f"{where}, the norm", rel_tol=NORM,
                 source="that of the full model's gradient is")


def _judge_gradients(norm, own, by_rank, reference, stages, limit, where):
    # The invariant: one factor on all ranks, and the same gradient for both copies of the tied
    # weight. Otherwise the copies drift apart from the first step on.
    factor = min(1.0, limit / _norm(reference.gradients.values()))
    for stage in stages.values():
        for name, in_model, parameter in _named(stage):
            want = factor * reference.gradients[in_model]
            if parameter.grad is None:
                raise Wrong(f"{where}, parameter {name!r}: it has no gradient any more",
                            "Scale gradients in place.", code="gradient_missing")
            off = (parameter.grad - want).abs().max().item()
            if not off <= NORM * max(1e-4, want.abs().max().item()):
                raise Wrong(f"{where}, parameter {name!r}: its gradient is "
                            + _what(parameter, own, by_rank, want, off),
                            "Every rank scales all of its gradients by the same factor, at most 1; "
                            "the tied one after its two gradients were added.", code="wrong_scale")


def _what(parameter, own, by_rank, want, off) -> str:
    ratio = (parameter.grad * want).sum().item() / max(want.square().sum().item(), 1e-30)
    if parameter is own.tied:
        alone = own.tied_here
        if _parallel(parameter.grad, alone):
            return ("only that of its own use: the copies on the first and the last stage become "
                    "different")
    if _parallel(parameter.grad, want):
        return f"{ratio:.4f}x what it should be"
    return f"off by up to {off:.2g}"


def _parallel(one, other) -> bool:
    # Direction alone: clipping has scaled one of them by a factor that may be wrong, too.
    cosine = (one * other).sum() / (one.norm() * other.norm()).clamp(min=1e-30)
    return cosine.item() > 1 - 1e-6


def _named(stage: Stage):
    """(name, name of the gradient in the reference, parameter): a tied head has the embedding's."""
    names = stage.names()
    for name, parameter in stage.named_parameters():
        in_model = names[name]
        yield in_model, ("model.embed_tokens.weight" if in_model == "lm_head.weight"
                         else in_model), parameter


def _norm(tensors) -> float:
    return sum(tensor.square().sum().item() for tensor in tensors)**0.5
