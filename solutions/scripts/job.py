"""Trains a GPT-2 on ragged answers: torchrun --standalone --nproc-per-node 2 job.py --clip 1"""
import argparse
import itertools
import json
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

from labs.scaling.ragged import answer_samples, count_answers, loss_sum
from labs.training import models


# Exercise 6.15: names and arguments are a proposal
def read_options():
    ### BEGIN SOLUTION
    options = argparse.ArgumentParser()
    for name, number in {"samples": 48, "batch": 2, "epochs": 2, "seed": 0, "layers": 2,
                         "hidden": 64, "accumulate": 3, "replicas": 1}.items():
        options.add_argument("--" + name, type=int, default=number)
    options.add_argument("--clip", type=float, default=1.0)
    options.add_argument("--metrics", default="job.json")
    return options.parse_args()
    ### END SOLUTION


def join():
    ### BEGIN SOLUTION
    rank, gpus = int(os.environ["LOCAL_RANK"]), torch.accelerator.device_count()
    enough = 0 < int(os.environ["LOCAL_WORLD_SIZE"]) <= gpus  # NCCL wants one for each rank
    dist.init_process_group(None if enough else "gloo")
    if gpus:
        torch.accelerator.set_device_index(rank % gpus)
    return torch.accelerator.current_accelerator() if gpus else torch.device("cpu")
    ### END SOLUTION


def shard(model, device, replicas):
    ### BEGIN SOLUTION
    shape = replicas, dist.get_world_size() // replicas
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicas", "shards"))
    mesh = mesh if replicas > 1 else mesh["shards"]
    for block in models.blocks(model):
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)
    ### END SOLUTION


def train_step(module, optimizer, parts, clip):
    ### BEGIN SOLUTION
    tokens, loss = sum(count_answers(part) for part in parts), 0
    dist.all_reduce(tokens)
    for part in parts:
        mine = loss_sum(module, part) / tokens
        (mine * dist.get_world_size()).backward()
        loss += mine.detach()
    dist.all_reduce(loss)
    norm = torch.nn.utils.clip_grad_norm_(module.parameters(), clip).full_tensor()
    optimizer.step()
    optimizer.zero_grad()
    return {"loss": loss.item(), "tokens": tokens.item(), "norm": norm.item()}
    ### END SOLUTION


def train(options, module, device):
    ### BEGIN SOLUTION
    rows = answer_samples(options.samples, options.seed)
    sampler = DistributedSampler(rows, seed=options.seed)
    loader = DataLoader(rows, options.batch, sampler=sampler)
    optimizer, steps = torch.optim.AdamW(module.parameters(), lr=1e-3), []
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        batches = ({name: t.to(device) for name, t in batch.items()} for batch in loader)
        while parts := list(itertools.islice(batches, options.accumulate)):
            steps.append(train_step(module, optimizer, parts, options.clip))
    return steps
    ### END SOLUTION


def main():
    ### BEGIN SOLUTION
    options, device = read_options(), join()
    whole = models.gpt2(options.layers, options.hidden, seed=options.seed)
    steps = train(options, shard(whole.to(device), device, options.replicas), device)
    if dist.get_rank() == 0:
        print(f"{len(steps)} steps, loss {steps[-1]['loss']:.3f}")
        with open(options.metrics, "w") as file:
            json.dump({"ranks": dist.get_world_size(), "steps": steps}, file)
    dist.barrier()
    dist.destroy_process_group()
    ### END SOLUTION


if __name__ == "__main__":
    main()
