"""Expert parallelism of ours, for the exercises that need a layer which is right, whatever the
student wrote before: a `Mixture` whose experts are divided over ranks, and which of its parameters
are on which ranks."""

import copy
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from labs.training.mixtures import ExpertLayer, Mixture
from labs.workers import devices

KINDS = ("experts", "router", "shared", "rest")


def kind_of(name: str) -> str:
    """Which of KINDS a parameter is, by its name."""
    found = {".experts.": "experts", ".router.": "router", ".shared_experts.": "shared"}
    return next((kind for part, kind in found.items() if part in name), "rest")


@dataclass(frozen=True)
class Layout:
    """How ranks are divided: `expert` consecutive ranks have one copy of the experts between them,
    and ranks / expert such groups have all of them."""

    ranks: int
    expert: int

    @property
    def replicas(self) -> int:
        """How many ranks have the same experts."""
        return self.ranks // self.expert

    def expert_group(self, rank: int) -> range:
        """The ranks that divide the experts with this one."""
        first = rank - rank % self.expert
        return range(first, first + self.expert)

    def replica_group(self, rank: int) -> range:
        """The ranks that have the same experts as this one."""
        return range(rank % self.expert, self.ranks, self.expert)

    def shard(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """The rank's part of a parameter of all experts, or of its gradient."""
        return tensor.chunk(self.expert)[rank % self.expert]

    def groups(self) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """On a rank: (expert group, replica group) of this rank."""
        mesh = init_device_mesh(devices.device().type, (self.replicas, self.expert),
                                mesh_dim_names=("replicate", "expert"))
        return mesh["expert"].get_group(), mesh["replicate"].get_group()


class AllToAll(torch.autograd.Function):
    """Rows to other ranks, and their gradients back. receive, send: rows from and to each rank."""

    @staticmethod
    def forward(ctx, rows, receive, send, group):
        ctx.splits = receive, send, group
        arrived = rows.new_empty(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), receive, send, group=group)
        return arrived

    @staticmethod
    def backward(ctx, gradient):
        receive, send, group = ctx.splits
        back = gradient.new_empty(sum(send), *gradient.shape[1:])
        dist.all_to_all_single(back, gradient.contiguous(), send, receive, group=group)
        return back, None, None, None


class ParallelExpertLayer(nn.Module):
    """`layer` with its experts divided over the group's ranks; parameters have the same names. An
    expert without tokens gets a gradient of zeros, because its block of no rows is computed too."""

    def __init__(self, layer: ExpertLayer, group: dist.ProcessGroup):
        super().__init__()
        self.k, self.router, self.group = layer.k, layer.router, group
        self.shared_experts, self.experts = layer.shared_experts, copy.deepcopy(layer.experts)
        for name, full in layer.experts.named_parameters():
            own = full.detach().chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()
            setattr(self.experts, name, nn.Parameter(own, requires_grad=full.requires_grad))

    def forward(self, x):
        tokens, experts = x.flatten(0, -2), self.router.out_features  # (tokens, hidden)
        weights, chosen = self.router(tokens).float().softmax(-1).topk(self.k)  # (tokens, k)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        order = chosen.flatten().argsort(stable=True)
        outputs = self._compute(tokens[order // self.k], chosen.flatten().bincount(
            minlength=experts))
        by_token = outputs[order.argsort()].unflatten(0, weights.shape)  # (tokens, k, hidden)
        result = (weights[..., None] * by_token).sum(1).view_as(x)
        shared = self.shared_experts
        return result if shared is None else result + shared(x)

    def _compute(self, copies, counts):
        """The experts' outputs, in the order of `copies`, which are sorted by expert."""
        ranks = dist.get_world_size(self.group)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        counts, theirs = counts.view(ranks, -1), theirs.view(ranks, -1)
        send, receive = counts.sum(1).tolist(), theirs.sum(1).tolist()
        arrived = AllToAll.apply(copies, receive, send, self.group)
        # What arrives is sorted by the rank that sent it; the experts need it sorted by expert.
        expert = torch.arange(theirs.numel(), device=copies.device) % theirs.shape[1]
        order = expert.repeat_interleave(theirs.flatten()).argsort(stable=True)
        outputs = self.experts(arrived[order], theirs.sum(0).tolist())
        return AllToAll.apply(outputs[order.argsort()], send, receive, self.group)


def divide_experts(model: Mixture, group: dist.ProcessGroup) -> Mixture:
    """Divides the experts of all layers over the group's ranks, in place; the model."""
    for block in model.layers:
        block.mlp = ParallelExpertLayer(block.mlp, group)
    return model


def gathered(model: Mixture, group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    """Name -> parameter, with the experts of all ranks of the group. On all ranks."""
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = parameter.detach()
        if kind_of(name) == "experts":
            parts = [torch.empty_like(found[name]) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, found[name], group=group)
            found[name] = torch.cat(parts)
    return found


def sum_gradients(gradients: dict[str, torch.Tensor], replicas: dist.ProcessGroup | None) -> None:
    """Sums gradients in place, by two all-reduces: the experts' over their replicas, all others
    over all ranks."""
    for is_expert, group in ((True, replicas), (False, None)):
        found = [gradient for name, gradient in gradients.items()
                 if (kind_of(name) == "experts") == is_expert]
        flat = torch.cat([gradient.flatten() for gradient in found])
        dist.all_reduce(flat, group=group)
        sizes = [gradient.numel() for gradient in found]
        for gradient, part in zip(found, flat.split(sizes), strict=True):
            gradient.copy_(part.view_as(gradient))
