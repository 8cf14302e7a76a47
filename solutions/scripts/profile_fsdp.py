"""Records steps of FSDP: torchrun --standalone --nproc-per-node 2 profile_fsdp.py"""
import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.profiler import profile, record_function, schedule
from transformers import GPT2Config, GPT2LMHeadModel

CONTEXT = 64  # tokens of a sample
NUMBERS = {"steps": 8, "wait": 3, "warmup": 1, "active": 2, "batch": 8, "layers": 2, "hidden": 64}


def make_batches(options):  # real text, in which a byte is a token: (steps, batch, CONTEXT)
    rank, size = dist.get_rank(), options.steps * options.batch * CONTEXT
    text = Path(argparse.__file__).read_bytes()[rank * size:(rank + 1) * size]
    return torch.tensor(list(text)).view(options.steps, options.batch, CONTEXT)


def make_model(options):
    torch.manual_seed(0)
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


# Exercise 5.11: records options.active steps, after options.wait that are not recorded and
# options.warmup that are thrown away, with stacks; then writes this rank's file into options.traces
def make_profiler(options):
    """Without `activities` the profiler records all that torch can: CPU, and GPU where one is."""
    ### BEGIN SOLUTION
    def write(profiler):
        profiler.export_chrome_trace(f"{options.traces}/rank_{dist.get_rank()}.json.gz")

    return profile(with_stack=True, on_trace_ready=write, schedule=schedule(
        wait=options.wait, warmup=options.warmup, active=options.active, repeat=1))
    ### END SOLUTION


# Exercise 5.11: all steps, each with the labels "forward", "backward" and "optimizer"
def train(module, optimizer, batches, profiler):
    ### BEGIN SOLUTION
    with profiler:
        for tokens in batches:
            with record_function("forward"):
                logits = module(tokens).logits
                loss = cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
            with record_function("backward"):
                loss.backward()
            with record_function("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
            profiler.step()
    ### END SOLUTION


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--traces", type=Path, default=Path("traces"), help="a folder")
    for name, default in NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options, device = parser.parse_args(), setup()
    options.traces.mkdir(parents=True, exist_ok=True)
    model = make_model(options).to(device)
    for block in model.transformer.h:
        fully_shard(block)
    module = fully_shard(model)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    train(module, optimizer, make_batches(options).to(device), make_profiler(options))
    dist.barrier()  # nothing is in flight any more when the group is destroyed
    dist.destroy_process_group()
