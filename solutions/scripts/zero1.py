"""Trains a GPT-2 whose optimizer state is divided among the ranks:
torchrun --standalone --nproc-per-node 2 zero1.py --epochs 2"""
import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler
from transformers import GPT2Config, GPT2LMHeadModel

CONTEXT = 64  # tokens of a sample
NUMBERS = {"epochs": 2, "samples": 256, "batch": 8, "seed": 0, "layers": 2, "hidden": 64}


def make_samples(number):  # real text, in which a byte is a token: (number, CONTEXT)
    text = Path(argparse.__file__).read_bytes()[:number * CONTEXT]
    return torch.tensor(list(text)).view(number, CONTEXT)


def make_model(options):
    torch.manual_seed(options.seed)
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=256, n_positions=CONTEXT, n_layer=options.layers, n_embd=options.hidden,
        n_head=4, embd_pdrop=0, attn_pdrop=0, resid_pdrop=0, use_cache=False,
        bos_token_id=None, eos_token_id=None))


def setup():  # as in ddp.py
    local, gpus = int(os.environ["LOCAL_RANK"]), torch.accelerator.device_count()
    dist.init_process_group("gloo" if gpus < int(os.environ["LOCAL_WORLD_SIZE"]) else None)
    if gpus:
        torch.accelerator.set_device_index(local % gpus)
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


# Exercise 3.11: an owner for each parameter, all with about as many numbers, and AdamW of this
# rank's own; a step gives owners the mean gradients, and all ranks the owners' new parameters
class ZeRO1:
    def __init__(self, parameters, lr):
        self.parameters = list(parameters)
        ### BEGIN SOLUTION
        self.owner, held = {}, [0] * dist.get_world_size()
        for parameter in sorted(self.parameters, key=torch.Tensor.numel, reverse=True):
            self.owner[parameter] = held.index(min(held))
            held[self.owner[parameter]] += parameter.numel()
        own = [p for p in self.parameters if self.owner[p] == dist.get_rank()]
        self.inner = torch.optim.AdamW(own, lr=lr)
        ### END SOLUTION

    def step(self):
        ### BEGIN SOLUTION
        for parameter in self.parameters:
            parameter.grad /= dist.get_world_size()
            dist.reduce(parameter.grad, dst=self.owner[parameter])
        self.inner.step()
        for parameter in self.parameters:
            dist.broadcast(parameter.detach(), src=self.owner[parameter])
        ### END SOLUTION

    def zero_grad(self):
        for p in self.parameters:
            p.grad = None


def train(options, device):
    samples = make_samples(options.samples)
    sampler = DistributedSampler(samples, seed=options.seed)
    loader = DataLoader(samples, batch_size=options.batch, sampler=sampler)
    model = make_model(options).to(device)
    optimizer = ZeRO1(model.parameters(), lr=1e-3)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for tokens in loader:
            tokens = tokens.to(device)
            logits = model(tokens).logits  # (batch, CONTEXT, vocabulary)
            loss = cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        dist.get_rank() or print(f"epoch {epoch}: loss {loss.item():.3f} on rank 0")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name, default in NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    train(parser.parse_args(), setup())
    dist.barrier()  # nothing is in flight any more when the group is destroyed
    dist.destroy_process_group()
