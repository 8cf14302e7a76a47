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
from labs.predictions.dryrun.phases import phases as _phases
from labs.predictions.dryrun.probe import Probe
from labs.predictions.dryrun.tracker import Tracker


@dataclass(frozen=True)
class Trace:
    """One run: the tracker's events, its labels (storage key -> category), and the second step's
    collectives and gradients. untried: operator -> bytes of its largest call, where what it takes
    for itself is not known."""

    events: list[tuple]
    labels: dict[int, str]
    calls: list[CollectiveCall]
    gradients: list[tuple[int | None, int]]  # (block, bytes), in the order of computation
    untried: dict[str, int]


def trace(job: jobs.DryRunJob, threads: int, backend: str = "gloo") -> Trace:
    """Runs the job's rank 0 with fake tensors; the process group must be up."""
    probe = Probe(threads) if backend == "gloo" else None
    tracker, traffic = Tracker(threads, backend, job.device, probe), Traffic()
    # Before tensors are fake: a mesh reads its ranks' numbers, which fake tensors do not have.
    mesh = init_device_mesh(job.device, (job.ranks,)) if dist.is_initialized() else None
    with fake.tensors(tracker), traffic, _labelled_fsdp(tracker):
        calls, gradients = _run(job, mesh, tracker, traffic)
    return Trace(tracker.events, tracker.labels, calls, gradients, tracker.untried)


def _run(job, mesh, tracker, traffic):
    tracker.mark(("build", "start"))
    module, optimizer, data = _build(job, mesh, tracker)
    order = label_gradients(module, tracker)
    ddp.prepare(module, order, tracker)
    tracker.mark(("first", "start"))
    # The first step makes the optimizer's state and DDP's final buckets: only the second one
    # counts.
    with _phases(module, tracker, marked=False):
        jobs.step(job, module, optimizer, data)
    _mark_blocks(jobs.blocks(module), tracker)
    before = len(traffic.calls)
    with _phases(module, tracker, marked=True):
        jobs.step(job, module, optimizer, data)
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
    return module, optimizer, data


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
