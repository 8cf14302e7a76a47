"""Trains a Llama with tensor parallelism, in replicas that FSDP shards:
torchrun --standalone --nproc-per-node 4 tp.py --tensor 2"""
import argparse
import os
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM

CONTEXT = 64  # tokens of a sample
NUMBERS = {"tensor": 2, "epochs": 2, "samples": 64, "batch": 4, "seed": 0, "layers": 2, "hidden": 64}


def make_samples(number):  # real text, in which a byte is a token: (number, CONTEXT)
    text = Path(argparse.__file__).read_bytes()[:number * CONTEXT]
    return torch.tensor(list(text)).view(number, CONTEXT)


def make_model(options):
    torch.manual_seed(options.seed)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=256, hidden_size=options.hidden, intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers, num_attention_heads=8, num_key_value_heads=4,
        max_position_embeddings=CONTEXT, use_cache=False))


def setup():  # as in ddp.py
    local, gpus = int(os.environ["LOCAL_RANK"]), torch.accelerator.device_count()
    dist.init_process_group("gloo" if gpus < int(os.environ["LOCAL_WORLD_SIZE"]) else None)
    if gpus:
        torch.accelerator.set_device_index(local % gpus)
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


# Exercise 7.28: shards embedding, projections and head over the mesh's dimension "tensor", then each
# layer and the rest over its dimension "data"; every rank has all logits
def parallelize(model, mesh):
    ### BEGIN SOLUTION
    columns, rows = ColwiseParallel(), RowwiseParallel()
    layer = {"self_attn.[qkv]_proj": columns, "self_attn.o_proj": rows,
             "mlp.gate_proj": columns, "mlp.up_proj": columns, "mlp.down_proj": rows}
    parallelize_module(model, mesh["tensor"], {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
        **{f"model.layers.*.{name}": style for name, style in layer.items()}})
    for module in [*model.model.layers, model]:
        fully_shard(module, mesh=mesh["data"])
    return model
    ### END SOLUTION


# Exercise 7.28: the ranks of one replica draw the same samples, replicas different ones
def make_sampler(samples, mesh, seed):
    ### BEGIN SOLUTION
    data = mesh["data"]
    return DistributedSampler(samples, data.size(), data.get_local_rank(), seed=seed)
    ### END SOLUTION


def train(options, device):
    ranks = dist.get_world_size()
    mesh = init_device_mesh(device.type, (ranks // options.tensor, options.tensor),
                            mesh_dim_names=("data", "tensor"))
    samples = make_samples(options.samples)
    sampler = make_sampler(samples, mesh, options.seed)
    loader = DataLoader(samples, batch_size=options.batch, sampler=sampler)
    module = parallelize(make_model(options).to(device), mesh)
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
        dist.get_rank() or print(f"epoch {epoch}: loss {loss.item():.3f} in one replica")
    whole = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True))
    dist.get_rank() or torch.save(whole, options.checkpoint)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", default="tp.pt")
    for name, default in NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    warnings.filterwarnings("ignore", "FSDP2-wrapped")  # of logits changed in place: nobody does
    train(parser.parse_args(), setup())
    dist.barrier()  # nothing is in flight any more when the group is destroyed
    dist.destroy_process_group()
