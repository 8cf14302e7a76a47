"""Trains a mixture of experts with expert parallelism:
torchrun --standalone --nproc-per-node 4 moe.py --expert 2"""
import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
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


def mlp(x, gate_up, down):  # x (n, hidden), gate_up (2 · hidden, hidden), down (hidden, hidden)
    gate, up = linear(x, gate_up).chunk(2, dim=-1)
    return linear(silu(gate) * up, down)


class ExpertLayer(nn.Module):
    def __init__(self, options, group):
        super().__init__()
        n, h, self.k, self.group = options.experts, options.hidden, options.chosen, group
        self.router = nn.Linear(h, n, bias=False)
        # all experts, the same on every rank, because the seed is the same
        gate_up, down = torch.randn(n, 2 * h, h) / h ** 0.5, torch.randn(n, h, h) / h ** 0.5
        # Exercise 9.10: the ParameterDict self.experts, with this rank's part of both, in own memory
        ### BEGIN SOLUTION
        self.experts = nn.ParameterDict({
            "gate_up": gate_up.chunk(group.size())[group.rank()].clone(),
            "down": down.chunk(group.size())[group.rank()].clone()})
        ### END SOLUTION

    # Exercise 9.10: routes to the k most probable of all experts, with weights that add up to 1
    def forward(self, x):
        ### BEGIN SOLUTION
        tokens = x.view(-1, x.shape[-1])
        weights, chosen = self.router(tokens).softmax(-1).topk(self.k)
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=self.router.out_features)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        theirs = theirs.view(self.group.size(), -1)  # [i, j]: from rank i, for own expert j
        send = counts.view(self.group.size(), -1).sum(1).tolist()
        receive = theirs.sum(1).tolist()
        rows = all_to_all_single_autograd(tokens[order // self.k], receive, send, self.group)
        own = torch.arange(theirs.shape[1], device=x.device).repeat(len(theirs))
        by_expert = own.repeat_interleave(theirs.flatten()).argsort(stable=True)
        parts = rows[by_expert].split(theirs.sum(0).tolist())
        outputs = torch.cat([mlp(*each) for each in zip(
            parts, self.experts["gate_up"], self.experts["down"], strict=True)])
        back = all_to_all_single_autograd(outputs[by_expert.argsort()], send, receive, self.group)
        weights = (weights / weights.sum(-1, keepdim=True)).unsqueeze(-1)
        return (weights * back[order.argsort()].unflatten(0, chosen.shape)).sum(1).view_as(x)
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


# Exercise 9.10: every gradient is that of the mean loss of all ranks
def average_gradients(model, mesh):
    ### BEGIN SOLUTION
    for name, parameter in model.named_parameters():
        group = mesh["replicate"].get_group() if ".experts." in name else dist.group.WORLD
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= dist.get_world_size()
    ### END SOLUTION


def full_state(model, group):  # with all experts, on every rank of the group
    state = model.state_dict()
    for name in [name for name in state if name.endswith(("experts.gate_up", "experts.down"))]:
        parts = [torch.empty_like(state[name]) for _ in range(group.size())]
        dist.all_gather(parts, state[name].contiguous(), group=group)
        state[name] = torch.cat(parts)
    return state


def train(options, device):
    mesh = init_device_mesh(device.type, (dist.get_world_size() // options.expert, options.expert),
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
