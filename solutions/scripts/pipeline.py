"""Trains a transformer in stages: torchrun --standalone --nproc-per-node 2 pipeline.py"""
import argparse
import json
import os
from collections import OrderedDict
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy

CONTEXT, HIDDEN = 64, 64  # tokens of a sample; width
NUMBERS = {"epochs": 2, "samples": 64, "batch": 16, "micro_batches": 4, "seed": 0, "blocks": 4}


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, HIDDEN), nn.Embedding(CONTEXT, HIDDEN)

    def forward(self, tokens):  # (batch, CONTEXT) -> (batch, CONTEXT, hidden)
        return self.tokens(tokens) + self.places.weight


class Block(nn.TransformerEncoderLayer):
    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, x.device)
        return super().forward(x, src_mask=mask, is_causal=True)


def make_layers(options):  # name -> module, in the order in which they run
    torch.manual_seed(options.seed)
    blocks = {f"block_{number}": Block(HIDDEN, 4, dropout=0, batch_first=True, norm_first=True)
              for number in range(options.blocks)}
    return {"embedding": Embedding(), **blocks,
            "head": nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 256))}


def setup():  # as in ddp.py
    local, gpus = int(os.environ["LOCAL_RANK"]), torch.accelerator.device_count()
    dist.init_process_group("gloo" if gpus < int(os.environ["LOCAL_WORLD_SIZE"]) else None)
    if gpus:
        torch.accelerator.set_device_index(local % gpus)
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


# Exercise 7.27: nn.Sequential of this rank's layers, by their names; as many as others, or one less
def cut(layers):
    ### BEGIN SOLUTION
    names, rank, ranks = list(layers), dist.get_rank(), dist.get_world_size()
    mine = names[rank * len(names) // ranks:(rank + 1) * len(names) // ranks]
    return nn.Sequential(OrderedDict((name, layers[name]) for name in mine))
    ### END SOLUTION


def loss_of(logits, tokens):
    return cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


# Exercise 7.27: all epochs, with SGD and lr=0.1; returns each step's loss on the last rank
def train(options, device, module):
    text = Path(argparse.__file__).read_bytes()[:options.samples * CONTEXT]
    batches = torch.tensor(list(text)).view(-1, options.batch, CONTEXT).to(device)
    ### BEGIN SOLUTION
    losses, rank, ranks = [], dist.get_rank(), dist.get_world_size()
    stage = PipelineStage(module, rank, ranks, device)
    schedule = Schedule1F1B(stage, options.micro_batches, loss_fn=loss_of)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for tokens in options.epochs * list(batches):
        if rank == 0:
            schedule.step(tokens)
        elif rank < ranks - 1:
            schedule.step()
        else:
            of_micro_batches = []
            schedule.step(target=tokens, losses=of_micro_batches)
            losses.append(torch.stack(of_micro_batches).mean().item())
        optimizer.step()
        optimizer.zero_grad()
    return losses
    ### END SOLUTION


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path("pipeline"), help="what ranks save")
    for name, default in NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options, device = parser.parse_args(), setup()
    module = cut(make_layers(options)).to(device)
    losses = train(options, device, module)
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.save(module.state_dict(), options.folder / f"stage_{dist.get_rank()}.pt")
    if losses:
        (options.folder / "losses.json").write_text(json.dumps(losses))
        print(f"{len(losses)} steps on {dist.get_world_size()} stages, loss {losses[-1]:.3f}")
    dist.barrier()  # nothing is in flight any more when the group is destroyed
    dist.destroy_process_group()
