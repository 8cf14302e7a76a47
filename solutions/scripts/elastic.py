"""Trains a small GPT whose ranks may be killed at any moment:
torchrun --standalone --nproc-per-node 2 --max-restarts 3 elastic.py"""
import os
import time
from itertools import islice

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

from labs.surviving_failure import elastic_job as job
from labs.training import data, models


# Exercise 8.6: the state after `done` steps, complete or not at all, in f"step_{done}" of the folder
def save(done, module, optimizer, scheduler, folder):
    ### BEGIN SOLUTION
    model, moments = get_state_dict(module, optimizer)
    state = {"model": model, "optimizer": moments, "scheduler": scheduler.state_dict()}
    dcp.save(state, checkpoint_id=folder / "unfinished")
    if dist.get_rank() == 0:
        os.replace(folder / "unfinished", folder / f"step_{done}")
    dist.barrier()
    ### END SOLUTION


# Exercise 8.6: loads the newest complete state, the same on all ranks; returns its number of steps
def resume(module, optimizer, scheduler, folder):
    ### BEGIN SOLUTION
    newest = [max((int(path.name[5:]) for path in folder.glob("step_*")), default=0)]
    dist.broadcast_object_list(newest)
    if newest[0]:
        model, moments = get_state_dict(module, optimizer)
        state = {"model": model, "optimizer": moments, "scheduler": scheduler.state_dict()}
        dcp.load(state, checkpoint_id=folder / f"step_{newest[0]}")
        set_state_dict(module, optimizer, model_state_dict=model, optim_state_dict=moments)
        scheduler.load_state_dict(state["scheduler"])
    return newest[0]
    ### END SOLUTION


# Exercise 8.6: all steps that are not done yet; a checkpoint after every options.every steps
def train(batches, module, optimizer, scheduler, options):
    """batches: this rank's samples of each step, from step 0 on, without end."""
    ### BEGIN SOLUTION
    done = resume(module, optimizer, scheduler, options.checkpoints)
    for step, samples in enumerate(islice(batches, done, options.steps), start=done):
        torch.manual_seed(1000 * step + dist.get_rank())  # of dropout: nothing to save
        take_step(step, samples, module, optimizer, scheduler, options)
        if (step + 1) % options.every == 0:
            save(step + 1, module, optimizer, scheduler, options.checkpoints)
    ### END SOLUTION


def take_step(step, rows, module, optimizer, scheduler, options):
    """Trains on this rank's samples, and notes the loss of all ranks together."""
    began = time.time()
    loss = module(rows).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    total = loss.detach()
    dist.all_reduce(total)
    job.note(options, "step", step=step, loss=total.item() / dist.get_world_size(), began=began)


def main():
    options = job.parse_options()
    device = job.join_group(options)
    windows = data.windows(options.samples, job.CONTEXT, options.seed)[:, :-1].to(device)
    model = models.Decoder(options.layers, options.hidden, options.dropout, options.seed)
    module = DistributedDataParallel(model.to(device))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, options.steps)
    train(job.batches(windows, options), module, optimizer, scheduler, options)
    job.leave_group()


if __name__ == "__main__":
    main()
