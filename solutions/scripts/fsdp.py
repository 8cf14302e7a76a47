"""Trains a GPT-2 in shards: torchrun --standalone --nproc-per-node 2 fsdp.py --epochs 2"""
import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler
from transformers import GPT2Config, GPT2LMHeadModel

CONTEXT = 64  # tokens of a sample
VALUES = {"epochs": 2, "samples": 256, "batch": 8, "seed": 0, "layers": 2, "hidden": 64, "lr": 1e-3}


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


# Exercise 4.13: options.bf16: gather in bf16, reduce in fp32; options.recompute: checkpoint blocks
def shard(model, options):
    ### BEGIN SOLUTION
    policy = MixedPrecisionPolicy()
    if options.bf16:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    blocks = model.transformer.h
    for number, block in enumerate(blocks):
        if options.recompute:
            blocks[number] = block = checkpoint_wrapper(block)
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)
    ### END SOLUTION


# Exercise 4.13: everything that a job needs to continue, also the number of finished epochs
def save(module, optimizer, epochs, path):
    ### BEGIN SOLUTION
    weights, moments = get_state_dict(module, optimizer)
    dcp.save({"model": weights, "optimizer": moments, "epochs": epochs}, checkpoint_id=path)
    ### END SOLUTION


# Exercise 4.13: fills this module and optimizer; returns how many epochs are done
def load(module, optimizer, path):
    ### BEGIN SOLUTION
    weights, moments = get_state_dict(module, optimizer)
    state = {"model": weights, "optimizer": moments, "epochs": 0}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(module, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return state["epochs"]
    ### END SOLUTION


def train(options, device):
    samples = make_samples(options.samples)
    sampler = DistributedSampler(samples, seed=options.seed)
    loader = DataLoader(samples, batch_size=options.batch, sampler=sampler)
    module = shard(make_model(options).to(device), options)
    optimizer = torch.optim.AdamW(module.parameters(), lr=options.lr)
    done = load(module, optimizer, options.resume) if options.resume else 0
    for epoch in range(done, options.epochs):
        sampler.set_epoch(epoch)
        for tokens in loader:
            tokens = tokens.to(device)
            logits = module(tokens).logits  # (batch, CONTEXT, vocabulary)
            loss = cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        save(module, optimizer, epoch + 1, Path(options.checkpoints, f"epoch_{epoch + 1}"))
        dist.get_rank() or print(f"epoch {epoch}: loss {loss.item():.3f} on rank 0")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoints", default="fsdp_checkpoints", help="a folder for all epochs")
    parser.add_argument("--resume", help="the folder of one epoch, with which to go on")
    for flag in ("bf16", "recompute"):
        parser.add_argument(f"--{flag}", action="store_true")
    for name, default in VALUES.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    train(parser.parse_args(), setup())
    dist.barrier()  # nothing is in flight any more when the group is destroyed
    dist.destroy_process_group()
