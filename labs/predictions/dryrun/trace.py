"""One traced run: build and two steps, of which the first allocates the optimizer's state; every
tensor is labelled with its category."""

import contextlib
import unittest.mock
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from labs.meters.traffic import CollectiveCall, Traffic
from labs.predictions.dryrun import ddp, fake, jobs
from labs.predictions.dryrun.tracker import Tracker


@dataclass(frozen=True)
class Trace:
    """One run: the tracker's events, its labels (storage key -> category), and the second step's
    collectives and gradients."""

    events: list[tuple]
    labels: dict[int, str]
    calls: list[CollectiveCall]
    gradients: list[tuple[int | None, int]]  # (block, bytes), in the order of computation


def trace(job: jobs.Job, threads: int, backend: str = "gloo") -> Trace:
    """Runs the job's rank 0 with fake tensors; the process group must be up."""
    tracker, traffic = Tracker(threads, backend, job.device), Traffic()
    mesh = init_device_mesh(job.device, (job.ranks,)) if dist.is_initialized() else None
    with fake.tensors(tracker), traffic, _labelled_fsdp(tracker):
        calls, gradients = _run(job, mesh, tracker, traffic)
    return Trace(tracker.events, tracker.labels, calls, gradients)


def _run(job, mesh, tracker, traffic):
    tracker.mark(("build", "start"))
    module, optimizer, data = _build(job, mesh, tracker)
    order = label_gradients(module, tracker)
    _label_optimizer(optimizer, tracker)
    tracker.mark(("first", "start"))
    _step(job, module, optimizer, data, tracker, first=True)
    ddp.rebuild_buckets(module, order, tracker)
    _mark_blocks(jobs.blocks(module), tracker)
    before = len(traffic.calls)
    _step(job, module, optimizer, data, tracker)
    return traffic.calls[before:], _owned(order, jobs.blocks(module))


def _owned(order, blocks) -> list:
    owner = {id(p): index for index, block in enumerate(blocks) for p in block.parameters()}
    return [(owner.get(id(p)), p.numel() * p.element_size()) for p in dict.fromkeys(order)]


def _build(job, mesh, tracker):
    model = jobs.build(job)
    tracker.mark(("build", "wrap"))
    with tracker.labelled("buffers"):
        module, optimizer = jobs.wrap(job, model, mesh)
    tracker.label("parameters", *module.parameters(), *module.buffers())
    with tracker.labelled("other"):
        data = jobs.batch(job, model)
    ddp.complete_all_reduces(module)
    return module, optimizer, data


def _step(job, module, optimizer, data, tracker, first=False):
    """One step of the plain loop, with a mark at each phase; the first step gets no marks."""
    mark = (lambda what: None) if first else tracker.mark
    mark(("forward", "start"))
    loss = jobs.forward(job, module, data)
    mark(("backward", "start"))
    loss.backward()
    tracker.label("gradients", *(p.grad for p in module.parameters() if p.grad is not None))
    mark(("step", "start"))
    optimizer.step()
    mark(("end", "start"))
    optimizer.zero_grad()


def label_gradients(module: torch.nn.Module, tracker: Tracker) -> list[torch.nn.Parameter]:
    """Labels gradients when they are computed; returns a list that fills with parameters in that
    order."""
    order = []

    def computed(parameter):
        order.append(parameter)
        if parameter.grad is not None:
            tracker.label("gradients", parameter.grad)

    for parameter in module.parameters():
        if parameter.requires_grad and not isinstance(parameter, DTensor):
            parameter.register_post_accumulate_grad_hook(computed)
    return order


def _label_optimizer(optimizer, tracker):
    labelling = contextlib.ExitStack()

    def before(*_):
        labelling.enter_context(tracker.labelled("other"))

    def after(*_):
        labelling.close()
        tracker.label("optimizer state", *optimizer.state.values())

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


def _mark_blocks(blocks, tracker):
    """Marks where forward enters a block, and where backward does: when the gradient of the
    block's output has been computed."""
    for index, block in enumerate(blocks):
        def enter(module, args, index=index):
            tracker.mark(("block", index))

        def leave(module, args, output, index=index):
            first = first_differentiable(output)
            if first is not None:
                first.register_hook(lambda gradient: tracker.mark(("block", index)))

        block.register_forward_pre_hook(enter)
        block.register_forward_hook(leave)


def first_differentiable(value) -> torch.Tensor | None:
    """The first tensor in nested containers whose gradient is computed; None if there is none."""
    return next((leaf for leaf in tree_leaves(value)
                 if isinstance(leaf, torch.Tensor) and leaf.requires_grad), None)


@contextlib.contextmanager
def _labelled_fsdp(tracker):
    """Labels what FSDP2 allocates while it gathers or reduces: buffers, except for the sharded
    gradient that stays."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    with contextlib.ExitStack() as stack:
        for name in ("unshard", "wait_for_unshard", "post_backward"):
            labelled = _labelled(getattr(FSDPParamGroup, name), tracker)
            stack.enter_context(unittest.mock.patch.object(FSDPParamGroup, name, labelled))
        yield


def _labelled(method, tracker):
    def labelled(group, *args, **kwargs):
        for shard in group.fsdp_params:
            whole = getattr(shard, "_unsharded_param", None)
            if whole is not None and whole.grad is not None:
                tracker.label("gradients", whole.grad)
        with tracker.labelled("buffers"):
            result = method(group, *args, **kwargs)
        for shard in group.fsdp_params:
            if shard.sharded_param.grad is not None:
                tracker.label("gradients", shard.sharded_param.grad)
        return result
    return labelled
