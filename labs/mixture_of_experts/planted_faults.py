"""Backward passes of a mixture of experts on ranks, healthy or with one of five planted faults, and
what they leave: gradients beside those of one process."""

import functools
from dataclasses import dataclass

import torch
import torch.distributed as dist

from labs.checks.on_ranks import on_ranks
from labs.mixture_of_experts.reference_parallel import (
    KINDS,
    Layout,
    divide_experts,
    kind_of,
    sum_gradients,
)
from labs.training import data
from labs.training.mixtures import Mixture
from labs.training.models import move_to_rank
from labs.workers import devices

FAULTS = ("experts_doubled", "summed_each_time", "router_partial", "weights_detached",
          "shared_twice")
PARTS = (1, 3)  # micro-batches of the two digests
Digest = dict[str, tuple[float, float]]  # kind -> (norm / that of one process, cosine)


@dataclass(frozen=True)
class FaultRun:
    """Digests of rank 0's gradients after one and after three micro-batches."""

    layout: Layout
    fault: str | None
    one: Digest
    three: Digest


@dataclass(frozen=True)
class Model:
    """A `Mixture` with a shared expert, and the text that it is trained on, by a seed."""

    seed: int = 0
    layers: int = 2
    hidden: int = 16
    experts: int = 4
    k: int = 2
    context: int = 16
    per_rank: int = 2  # sequences of a micro-batch

    def build(self) -> Mixture:
        return move_to_rank(Mixture(self.layers, self.hidden, self.experts, self.hidden, self.k,
                                    shared=True, context=self.context, seed=self.seed))

    def micro_batches(self, ranks: int) -> list[torch.Tensor]:
        """Tokens of all ranks, (ranks · per_rank, context) each."""
        batches = data.lm_batches(max(PARTS), ranks * self.per_rank, self.context, self.seed)
        return [batch["input_ids"].to(devices.device()) for batch in batches]


@functools.cache
def recorded(layouts: tuple[Layout, ...], model: Model, device: str) -> list[FaultRun]:
    """A healthy run and one with each fault, in each layout, recorded once in a process. device: of
    `devices.device()`, on which they run. Layouts with EP = 1 have no run with
    "experts_doubled", which changes nothing there. One launch for each number of ranks."""
    found = []
    for ranks in dict.fromkeys(layout.ranks for layout in layouts):
        of_ranks = tuple(layout for layout in layouts if layout.ranks == ranks)
        found += on_ranks(_record, of_ranks, model, world_sizes=(ranks,), timeout=60)[0]
    return found


def _record(layouts, model) -> list[FaultRun]:
    """On a rank: the runs; their digests are rank 0's."""
    batches = model.micro_batches(dist.get_world_size())
    # (micro-batches, the gradients of one process)
    wanted = [(batches[:parts], _of_one_process(model, batches[:parts])) for parts in PARTS]
    found = []
    for layout in layouts:
        groups = layout.groups()
        found += [FaultRun(layout, fault, *(
            _digest(layout, _gradients(model, layout, groups, fault, several), want)
            for several, want in wanted)) for fault in (None, *FAULTS)
            if fault != "experts_doubled" or layout.expert > 1]
    return found


def _of_one_process(of, batches) -> dict[str, torch.Tensor]:
    model = of.build()
    for batch in batches:
        (model(batch).loss / len(batches)).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def _gradients(of, layout, groups, fault, batches) -> dict[str, torch.Tensor]:
    """Gradients of this rank after forward and backward of the micro-batches, averaged."""
    model = divide_experts(of.build(), groups[0])
    if fault == "weights_detached":
        for block in model.layers:
            block.mlp.router.register_forward_hook(lambda _, __, logits: logits.detach())
    for number, batch in enumerate(batches):
        if fault == "summed_each_time" and number:
            # Megatron-LM 6660: buffer = 2 · buffer + gradient, for each micro-batch.
            for name, parameter in model.named_parameters():
                if kind_of(name) == "experts":
                    parameter.grad *= 2
        own = batch.chunk(layout.ranks)[dist.get_rank()]
        (model(own).loss / len(batches)).backward()
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad
             for name, p in model.named_parameters()}
    kept = {name for name in found if fault == "router_partial" and kind_of(name) == "router"}
    sum_gradients({name: found[name] for name in found if name not in kept}, groups[1])
    for name in found.keys() - kept:
        kind = kind_of(name)
        # the mean over its replicas, in place of all ranks
        doubled = kind == "experts" and fault == "experts_doubled"
        found[name] /= layout.replicas if doubled else layout.ranks
        if kind == "shared" and fault == "shared_twice":
            found[name] /= layout.ranks
    return found


def _digest(layout, found, want) -> Digest:
    digest = {}
    for kind in KINDS:
        names = [name for name in want if kind_of(name) == kind]
        got = torch.cat([found[name].flatten() for name in names]).double()
        right = torch.cat([(layout.shard(want[name], dist.get_rank()) if kind == "experts" else
                            want[name]).flatten() for name in names]).double()
        norms = got.norm().item(), right.norm().item()
        cosine = (got @ right).item() / (norms[0] * norms[1]) if norms[0] else 0.0
        digest[kind] = norms[0] / norms[1], cosine
    return digest
