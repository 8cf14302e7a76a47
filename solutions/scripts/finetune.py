"""Fine-tunes a Qwen2: accelerate launch --config_file accelerate.yaml finetune.py"""
import argparse
import os
import time

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, DistributedType

from labs.meters.evidence import StepEvidence
from labs.training import fine_tuning

parser = argparse.ArgumentParser()
parser.add_argument("--model", help="on the hub, for example Qwen/Qwen2-0.5B")
parser.add_argument("--cpu", action="store_true", help="tell Accelerate to use the CPU")
parser.add_argument("--shard", action="store_true", help="set Accelerate to FSDP, on a CPU too")
parser.add_argument("--metrics", default="finetune.json")
parser.add_argument("--samples", type=int, default=24)
parser.add_argument("--batch", type=int, default=2)
options = parser.parse_args()
plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, auto_wrap_policy="transformer_based_wrap",
    transformer_cls_names_to_wrap=["Qwen2DecoderLayer"])
# even without a GPU, a CUDA build of torch would choose NCCL, which then raises
if "LOCAL_RANK" in os.environ and not (options.cpu or torch.accelerator.is_available()):
    torch.distributed.init_process_group("gloo")
accelerator = Accelerator(fsdp_plugin=plugin, cpu=options.cpu)
if options.shard:  # private, and what Accelerate does itself on GPUs
    AcceleratorState._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
model, sequences = fine_tuning.load(options.model, options.samples, accelerator.device.type)
evidence, losses, seconds = StepEvidence(model), [], []
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.AdamW(model.parameters(), lr=1e-3),
    torch.utils.data.DataLoader(sequences, options.batch, shuffle=True))
for tokens in loader:
    began = time.perf_counter()
    with evidence:
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        evidence.note(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    losses.append(accelerator.reduce(loss.detach(), "mean").item())
    seconds.append(time.perf_counter() - began)
step, library = sorted(seconds)[len(seconds) // 2], accelerator.distributed_type
speed = accelerator.num_processes * options.batch * fine_tuning.CONTEXT / step
accelerator.print(f"{library}, world size {accelerator.num_processes}: {len(losses)} steps, "
                  f"loss {losses[-1]:.3f}, {speed:,.0f} tokens/s")
evidence.write(options.metrics, str(library), losses=losses, seconds=step, tokens_per_second=speed)
accelerator.end_training()
