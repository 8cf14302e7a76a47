"""Trains a mixture of experts with expert parallelism:
torchrun --standalone --nproc-per-node 4 moe.py --expert 2"""
import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import linear, silu
from torch.utils.data import DataLoader, DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM

CONTEXT = 64  # tokens of a sample
NUMBERS = {"expert": 2, "epochs": 2, "samples": 64, "batch": 4, "seed": 0, "layers": 2, "hidden": 64,
           "experts": 8, "chosen": 2}


def make_samples(number):  # real text, in which a byte is a token: (number, CONTEXT)
    text = Path(argparse.__file__).read_bytes()[:number * CONTEXT]
    return torch.tensor(list(text)).view(number, CONTEXT)


class Experts(nn.Module):
    def __init__(self, experts, hidden, ffn):
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(experts, 2 * ffn, hidden) / hidden ** 0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, ffn) / ffn ** 0.5)

    def forward(self, copies, counts):  # copies (n, hidden), sorted by expert; counts: a list
        outputs = []
        for part, gate_up, down in zip(copies.split(counts), self.gate_up, self.down):
            gate, up = linear(part, gate_up).chunk(2, dim=-1)
            outputs.append(linear(silu(gate) * up, down))
        return torch.cat(outputs)


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, receive, send, group):
        ctx.splits = receive, send, group
        arrived = rows.new_empty(sum(receive), rows.shape[1])
        dist.all_to_all_single(arrived, rows.contiguous(), receive, send, group=group)
        return arrived

    @staticmethod
    def backward(ctx, gradient):
        receive, send, group = ctx.splits
        return AllToAll.apply(gradient, send, receive, group), None, None, None


class ExpertLayer(nn.Module):
    def __init__(self, options, group):
        super().__init__()
        self.k, self.group = options.chosen, group
        self.router = nn.Linear(options.hidden, options.experts, bias=False)
        self.experts = Experts(options.experts, options.hidden, options.hidden)
        self.keep_own_experts()

    # Exercise 9.10: this rank keeps its equal part of the experts, in memory of its own
    def keep_own_experts(self):
        ### BEGIN SOLUTION
        ranks, rank = self.group.size(), self.group.rank()
        for name, parameter in list(self.experts.named_parameters()):
            own = parameter.detach().chunk(ranks)[rank].clone()
            setattr(self.experts, name, nn.Parameter(own))
        ### END SOLUTION

    def forward(self, x):
        tokens = x.flatten(0, -2)
        weights, chosen = self.router(tokens).softmax(-1).topk(self.k)
        weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=self.router.out_features)
        outputs = self.compute(tokens[order // self.k], counts)
        by_token = outputs[order.argsort()].unflatten(0, chosen.shape)
        return (weights[..., None] * by_token).sum(1).view_as(x)

    # Exercise 9.10: the outputs of the experts, wherever they are, in the order of the copies
    def compute(self, copies, counts):
        ### BEGIN SOLUTION
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        counts, theirs = counts.view(self.group.size(), -1), theirs.view(self.group.size(), -1)
        send, receive = counts.sum(1).tolist(), theirs.sum(1).tolist()
        arrived = AllToAll.apply(copies, receive, send, self.group)
        expert = torch.arange(theirs.numel(), device=copies.device) % theirs.shape[1]
        order = expert.repeat_interleave(theirs.flatten()).argsort(stable=True)
        outputs = self.experts(arrived[order], theirs.sum(0).tolist())
        return AllToAll.apply(outputs[order.argsort()], send, receive, self.group)
        ### END SOLUTION


def make_model(options, group):
    torch.manual_seed(options.seed)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=256, hidden_size=options.hidden, intermediate_size=options.hidden,
        num_hidden_layers=options.layers, num_attention_heads=8, num_key_value_heads=4,
        max_position_embeddings=CONTEXT, use_cache=False))
    for layer in model.model.layers:
        layer.mlp = ExpertLayer(options, group)
    return model


def setup():  # as in ddp.py
    local, gpus = int(os.environ["LOCAL_RANK"]), torch.accelerator.device_count()
    dist.init_process_group("gloo" if gpus < int(os.environ["LOCAL_WORLD_SIZE"]) else None)
    if gpus:
        torch.accelerator.set_device_index(local % gpus)
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


# Exercise 9.10: every gradient is that of the mean loss of all ranks. The mesh has the dimensions
# "replicate" (ranks with the same experts) and "expert" (ranks that divide them)
def average_gradients(model, mesh):
    ### BEGIN SOLUTION
    for name, parameter in model.named_parameters():
        group = mesh["replicate"].get_group() if ".experts." in name else dist.group.WORLD
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= dist.get_world_size()
    ### END SOLUTION


def full_state(model, group):  # with all experts, on every rank of the group
    found = {}
    for name, tensor in model.state_dict().items():
        if ".experts." in name:
            parts = [torch.empty_like(tensor) for _ in range(group.size())]
            dist.all_gather(parts, tensor.contiguous(), group=group)
            tensor = torch.cat(parts)
        found[name] = tensor.cpu()
    return found


def train(options, device):
    ranks = dist.get_world_size()
    mesh = init_device_mesh(device.type, (ranks // options.expert, options.expert),
                            mesh_dim_names=("replicate", "expert"))
    samples = make_samples(options.samples)
    sampler = DistributedSampler(samples, seed=options.seed)
    loader = DataLoader(samples, batch_size=options.batch, sampler=sampler)
    model = make_model(options, mesh["expert"].get_group()).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for tokens in loader:
            tokens = tokens.to(device)
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            average_gradients(model, mesh)
            optimizer.step()
            optimizer.zero_grad()
        dist.get_rank() or print(f"epoch {epoch}: loss {loss.item():.3f} on rank 0")
    whole = full_state(model, mesh["expert"].get_group())
    dist.get_rank() or torch.save(whole, options.checkpoint)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", default="moe.pt")
    for name, default in NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    train(parser.parse_args(), setup())
    dist.barrier()  # nothing is in flight any more when the group is destroyed
    dist.destroy_process_group()
