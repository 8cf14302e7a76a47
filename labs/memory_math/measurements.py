"""Measurements on one rank: what mixed precision halves, the bytes of a logit, of an optimizer's
step, and of what a forward saves for backward."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from labs.checks.comparison import batches, build, config_of, model_of
from labs.meters import memory
from labs.meters.allocations import read_profile
from labs.predictions.memory.predict import predict
from labs.training import data, hf_configs, strategies
from labs.training.loop import train
from labs.training.memory_categories import Memory
from labs.training.presets import Preset, preset
from labs.workers import cuda, devices
from labs.workers.launcher import launch

# Of the model whose optimizers are measured: 16 matrices of 64 x 64. On a GPU, too: bytes per
# parameter do not depend on the size, and a small matrix has a block of just its size.
TENSORS, WIDTH = 16, 64
# Batch and sequence of the model whose logits are measured, and its vocabulary. On a GPU they are
# the preset's, and a real vocabulary, because a block may be 1 MiB larger than its tensor: of so
# many logits that is less than 0.1 bytes each.
TOKENS = (2, 32)
VOCABULARY, VOCABULARY_ON_GPU = 4000, 32_000
_ADAMW = torch.optim.AdamW
_SGD = torch.optim.SGD
_MADE = {  # name in labs.predictions.memory.optimizers -> an optimizer of torch
    "AdamW, foreach": functools.partial(_ADAMW, foreach=True),
    "AdamW, one by one": functools.partial(_ADAMW, foreach=False),
    "AdamW, fused": functools.partial(_ADAMW, fused=True),
    "SGD with momentum": functools.partial(_SGD, lr=0.1, momentum=0.9, foreach=True),
    "SGD": functools.partial(_SGD, lr=0.1, foreach=True)}


class MasterAdamW:
    """AdamW for 16-bit parameters: it updates an fp32 master copy of each and copies it back. Like
    an optimizer of torch, as far as the plain loop and the memory meter need one."""

    def __init__(self, parameters: Iterable[nn.Parameter]):
        self._weights = list(parameters)
        self._masters = [nn.Parameter(weight.detach().float()) for weight in self._weights]
        self._adamw = torch.optim.AdamW(self._masters)
        # What the meter counts as parameters: the 16-bit weights, not the masters.
        self.param_groups = [{"params": self._weights}]

    @property
    def state(self) -> dict[int, dict[str, torch.Tensor]]:
        """Number of a parameter -> its moments and its master copy."""
        return {number: {**self._adamw.state[master], "master": master.detach()}
                for number, master in enumerate(self._masters)}

    def step(self) -> None:
        """Updates the master copies with the gradients in fp32, and the parameters with them."""
        for weight, master in zip(self._weights, self._masters, strict=True):
            master.grad = weight.grad.float()
        self._adamw.step()
        self._adamw.zero_grad()
        with torch.no_grad():
            for weight, master in zip(self._weights, self._masters, strict=True):
                weight.copy_(master)

    def zero_grad(self) -> None:
        """Drops the gradients."""
        for weight in self._weights:
            weight.grad = None


@dataclass(frozen=True)
class PrecisionMemory:
    """A recipe: bytes of the model states by category, after backward; bytes of activations at the
    end of forward, measured and predicted."""

    states: Memory
    activations: float
    predicted: float


RECIPES = {"fp32": (torch.float32, torch.optim.AdamW), "bf16, fp32 master": (torch.bfloat16,
                                                                             MasterAdamW)}


def measure_precisions(preset: Preset) -> dict[str, PrecisionMemory]:
    """Recipe -> what a rank holds that trains the preset's GPT-2 with it."""
    reports = launch(_precision_reports, preset, ranks=1, quiet=True, verify=False,
                     hang_after=60)[0]
    device = devices.plan(1).device
    found = {}
    for name, report in reports.items():
        predicted = predict(config_of(preset), batch=preset.batch, sequence=preset.context,
                            recipe=name, device=device, threads=1)["forward"].activations
        found[name] = PrecisionMemory(report.phases["backward"],
                                      report.phases["forward"].activations, predicted)
    return found


def _precision_reports(preset) -> dict[str, memory.Report]:
    torch.set_num_threads(1)  # CPU kernels hold a buffer per thread, predictions count one
    device = devices.device()
    batch = {name: values.to(device) for name, values in
             data.lm_batches(1, preset.batch, preset.context)[0].items()}

    def build(dtype, optimizer):
        model = model_of(preset).to(device, dtype).train()
        return model, optimizer(model.parameters())

    return {name: memory.record(lambda chosen=chosen: build(*chosen), [batch, batch])
            for name, chosen in RECIPES.items()}


def measured_logits() -> dict[str, dict[str, float]]:
    """Type of the model -> moment of a step -> bytes allocated for each logit. Two models that
    differ in nothing but the vocabulary are trained; their difference is what logits take."""
    return _measured_logits(devices.gpus())


@functools.cache
def _measured_logits(gpus) -> dict[str, dict[str, float]]:
    sizes, vocabulary = TOKENS, VOCABULARY
    if gpus:
        sizes, vocabulary = (preset().batch, preset().context), VOCABULARY_ON_GPU
    return launch(_bytes_per_logit, sizes, vocabulary, ranks=1, quiet=True, verify=False,
                  hang_after=60)[0]


def _bytes_per_logit(sizes, vocabulary) -> dict[str, dict[str, float]]:
    torch.set_num_threads(1)
    found = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        _loss_moments(dtype, sizes, 100)  # on a GPU, cuBLAS's workspaces come with the first run
        # Vocabularies of one and of two times the size: what does not depend on it cancels.
        small, large = (_loss_moments(dtype, sizes, times * vocabulary) for times in (1, 2))
        logits = vocabulary * sizes[0] * sizes[1]
        found[name] = {when: (large[when] - small[when]) / logits for when in large}
    return found


def _loss_moments(dtype, sizes, vocabulary) -> dict[str, float]:
    """Moment -> bytes of activations and temporaries of a small Llama with this vocabulary."""
    from transformers import AutoModelForCausalLM

    config = hf_configs.make("llama", hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
                             num_key_value_heads=2, intermediate_size=64, vocab_size=vocabulary,
                             use_cache=False)
    device = devices.device()
    tokens = (torch.arange(sizes[0] * sizes[1], device=device) % vocabulary).reshape(sizes)
    batch = {"input_ids": tokens, "labels": tokens}

    def build():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).to(device)
        return model, torch.optim.SGD(model.parameters())

    report = memory.record(build, [batch, batch])
    moments = {"the peak of forward": report.peaks["forward"],
               "the end of forward": report.phases["forward"],
               "the peak of backward": report.peaks["backward"]}
    return {when: held.activations + held.other for when, held in moments.items()}


def measured_optimizers() -> dict[str, tuple[float, float]]:
    """Optimizer -> (bytes of state, bytes that a step allocates and frees again), both for each
    parameter: of 16 fp32 matrices of equal size."""
    return _measured_optimizers(devices.gpus())


@functools.cache
def _measured_optimizers(gpus) -> dict[str, tuple[float, float]]:
    return launch(_optimizers, ranks=1, quiet=True)[0]


def _optimizers() -> dict[str, tuple[float, float]]:
    torch.set_num_threads(1)
    return {name: _step_of(make) for name, make in _MADE.items()}


def _step_of(make: Callable) -> tuple[float, float]:
    weights = [nn.Parameter(torch.ones(WIDTH, WIDTH, device=devices.device()))
               for _ in range(TENSORS)]
    optimizer = make(weights)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()  # makes the state
    held = highest = 0
    for nbytes in allocations_of(optimizer.step)[0]:
        held += nbytes
        highest = max(highest, held)
    state = sum(value.nbytes for state in optimizer.state.values() for value in state.values()
                if isinstance(value, torch.Tensor) and value.numel() > 1)  # no counter of steps
    return state / (TENSORS * WIDTH**2), highest / (TENSORS * WIDTH**2)


def allocations_of(work: Callable[[], Any]) -> tuple[list[int], Any]:
    """(bytes of each allocation on this rank's device, in the order of time, negative where memory
    is freed; the result of work()). On a rank, because the profiler writes lines of its own to the
    process's output."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = work()
    return [nbytes for _, _, nbytes, _ in read_profile(recorded)[0]], result


def left_for_backward(forward: Callable[[], torch.Tensor]) -> int:
    """Bytes that forward() allocates and that are still there when nothing is kept but the graph of
    its output; the output itself counts only if backward needs it. On a rank."""
    forward()  # some operations allocate memory for good when they run for the first time
    # The graph's last node keeps the graph, and does not keep the output.
    changes, graph = allocations_of(lambda: forward().grad_fn)
    del graph
    return sum(changes)


@dataclass(frozen=True)
class GpuMoment:
    """What one rank's GPU says at a moment: bytes of `GpuMemory`'s allocated, reserved and used.
    requested: the bytes of tensors, of allocated."""

    name: str
    allocated: int
    reserved: int
    used: int
    requested: int


def measure_gpu_memory(preset: Preset) -> list[GpuMoment]:
    """The three numbers of a GPU, of rank 0, from the first tensor to the end of DDP's third step.
    NCCL before 2.30 refuses two ranks on a GPU: where the preset's would share one, a single rank
    runs."""
    ranks = 1 if devices.are_shared(preset.ranks) else preset.ranks
    return launch(_gpu_moments, preset, ranks=ranks, quiet=True, verify=False, hang_after=60)[0]


def _gpu_moments(preset) -> list[GpuMoment]:
    moments = [_gpu_moment("a first tensor", torch.ones(1, device=devices.device()))]
    matrix = torch.ones(128, 128, device=devices.device())
    moments.append(_gpu_moment("a first matrix product", matrix @ matrix))
    dist.all_reduce(matrix)
    moments.append(_gpu_moment("a first all-reduce", matrix))
    pair = build(strategies.ddp, preset)
    train(*pair, batches(preset, 2))
    cuda.reset_peak()
    train(*pair, batches(preset, 1))
    held = cuda.memory()
    return [*moments, GpuMoment("the third step, at its peak", held.peak, held.reserved, held.used,
                                held.requested), _gpu_moment("after it", pair)]


def _gpu_moment(name, held) -> GpuMoment:
    """What the GPU says now. held: what is in memory until then."""
    cuda.reset_peak()
    found = cuda.memory()
    return GpuMoment(name, found.allocated, found.reserved, found.used, found.requested)
