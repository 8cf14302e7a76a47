"""Trains a GPT-2 on real text: torchrun --standalone --nproc-per-node 2 train.py --epochs 2"""
import argparse
import json
import os
import time

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from labs.training import data, models

NUMBERS = {"epochs": 2, "samples": 64, "batch": 4, "seed": 0, "layers": 2, "hidden": 64}


def join_group():
    """Joins the process group that the environment describes; returns this rank's device."""
    local, gpus = int(os.environ["LOCAL_RANK"]), torch.accelerator.device_count()
    shared = gpus < int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # NCCL wants a GPU for each rank
    dist.init_process_group("gloo" if shared else None)
    if not gpus:
        return torch.device("cpu")
    torch.accelerator.set_device_index(local % gpus)
    return torch.device(torch.accelerator.current_accelerator().type, local % gpus)


# Exercise 6.1: this rank's share of the windows, (samples, tokens), and the wrapped model
def prepare(windows, model, options):
    """(sampler, loader, module, optimizer): batches of options.batch; DDP, or FSDP by blocks."""
    ### BEGIN SOLUTION
    sampler = DistributedSampler(windows, seed=options.seed)
    loader = DataLoader(windows, options.batch, sampler=sampler)
    if options.strategy == "fsdp":
        for block in models.blocks(model):
            fully_shard(block)
        module = fully_shard(model)
    else:
        module = DistributedDataParallel(model)
    ### END SOLUTION
    return sampler, loader, module, torch.optim.AdamW(module.parameters(), lr=1e-3)


# Exercise 6.1: all epochs; "loss" is the mean over the samples of all ranks in this step
def train(sampler, loader, module, optimizer, scheduler, device, epochs):
    steps, before = [], time.perf_counter()
    ### BEGIN SOLUTION
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for windows in loader:
            windows = windows.to(device)
            loss = module(input_ids=windows, labels=windows).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total = torch.stack([loss.detach(), torch.ones_like(loss)]) * len(windows)
            dist.all_reduce(total)
            now, loss, rate = time.perf_counter(), total[0] / total[1], scheduler.get_last_lr()[0]
            steps.append({"loss": loss.item(), "learning_rate": rate, "seconds": now - before,
                          "tokens": total[1].item() * windows.shape[1]})
            before = now
            scheduler.step()
    ### END SOLUTION
    return steps


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", choices=["ddp", "fsdp"], default="ddp")
    parser.add_argument("--metrics", default="metrics.json")
    for name, default in NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options, device = parser.parse_args(), join_group()
    windows = data.windows(options.samples, context=64, seed=options.seed)[:, :-1]
    model = models.gpt2(options.layers, options.hidden, seed=options.seed).to(device)
    sampler, loader, module, optimizer = prepare(windows, model, options)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, options.epochs * len(loader))
    steps = train(sampler, loader, module, optimizer, scheduler, device, options.epochs)
    # Exercise 6.1: one rank prints the last loss and writes {"ranks": ..., "steps": steps}
    ### BEGIN SOLUTION
    if dist.get_rank() == 0:
        print(f"{len(steps)} steps on {dist.get_world_size()} ranks, loss {steps[-1]['loss']:.3f}")
        with open(options.metrics, "w") as file:
            json.dump({"ranks": dist.get_world_size(), "steps": steps}, file)
    ### END SOLUTION
    dist.barrier()  # nothing is in flight any more when the group is destroyed
    del module  # first: gloo can wait for ever where the last to hold a group is DDP's reducer
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
