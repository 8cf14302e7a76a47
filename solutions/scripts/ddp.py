"""Trains a GPT-2 on real text, each rank on its own part of every batch:
torchrun --standalone --nproc-per-node 2 ddp.py --epochs 2"""
import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
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


# Exercise 2.12: joins the process group that torchrun's variables describe; returns the device
def setup():
    """NCCL where each rank has a GPU of its own, else gloo."""
    ### BEGIN SOLUTION
    local, gpus = int(os.environ["LOCAL_RANK"]), torch.accelerator.device_count()
    dist.init_process_group("gloo" if gpus < int(os.environ["LOCAL_WORLD_SIZE"]) else None)
    if gpus:
        torch.accelerator.set_device_index(local % gpus)
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    ### END SOLUTION


# Exercise 2.12: all epochs, with AdamW and lr=1e-3; rank 0 prints, and saves options.checkpoint
def train(options, device):
    samples = make_samples(options.samples)
    model = make_model(options).to(device)
    ### BEGIN SOLUTION
    sampler = DistributedSampler(samples, seed=options.seed)
    loader = DataLoader(samples, batch_size=options.batch, sampler=sampler)
    module = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for tokens in loader:
            tokens = tokens.to(device)
            logits = module(tokens).logits  # (batch, CONTEXT, vocabulary)
            loss = cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f} on rank 0")
    if dist.get_rank() == 0:
        torch.save(module.module.state_dict(), options.checkpoint)
    ### END SOLUTION


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", default="ddp.pt")
    for name, default in NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options, device = parser.parse_args(), setup()
    train(options, device)
    # Nothing is in flight any more, and DDP is gone with the frame of train(), when the group is
    # destroyed: gloo can wait for ever where DDP's reducer holds it last.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
