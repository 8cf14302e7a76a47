"""Measurements on one rank: what mixed precision halves, what a logit takes, what a step of an
optimizer needs, what a forward leaves for backward."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from labs.exercises.comparison import model_of
from labs.meters import memory
from labs.predictions.memory import predict
from labs.training import data, hf_configs
from labs.training.memory_categories import Memory
from labs.training.presets import Preset
from labs.workers import devices
from labs.workers.launcher import launch

TENSORS, WIDTH = 16, 64  # of the model whose optimizers are measured: 16 matrices of 64 x 64
TOKENS = (2, 32)  # batch and sequence of the model whose logits are measured
VOCABULARY = 4000
_ADAMW = torch.optim.AdamW
_SGD = torch.optim.SGD
_MADE = {  # name in labs.predictions.optimizers -> an optimizer of torch
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
    device = devices.plan(1).devices[0].split(":")[0]
    found = {}
    for name, report in reports.items():
        predicted = predict(model_of(preset).config, batch=preset.batch, sequence=preset.context,
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


@functools.cache
def measured_logits() -> dict[str, dict[str, float]]:
    """Type of the model -> moment of a step -> bytes held for each logit. Two models that differ in
    nothing but the vocabulary are trained on the CPU; their difference is what logits take."""
    return launch(_bytes_per_logit, ranks=1, quiet=True, device="cpu", hang_after=60)[0]


def _bytes_per_logit() -> dict[str, dict[str, float]]:
    torch.set_num_threads(1)
    found = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        small, large = (_loss_moments(dtype, size) for size in (VOCABULARY, 2 * VOCABULARY))
        logits = VOCABULARY * TOKENS[0] * TOKENS[1]
        found[name] = {when: (large[when] - small[when]) / logits for when in large}
    return found


def _loss_moments(dtype, vocabulary) -> dict[str, float]:
    """Moment -> bytes of activations and temporaries of a small Llama with this vocabulary."""
    from transformers import AutoModelForCausalLM

    config = hf_configs.make("llama", hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
                             num_key_value_heads=2, intermediate_size=64, vocab_size=vocabulary,
                             use_cache=False)
    tokens = torch.arange(TOKENS[0] * TOKENS[1]).reshape(TOKENS)
    batch = {"input_ids": tokens, "labels": tokens}

    def build():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        return model, torch.optim.SGD(model.parameters())

    report = memory.record(build, [batch, batch])
    moments = {"the peak of forward": report.peaks["forward"],
               "the end of forward": report.phases["forward"],
               "the peak of backward": report.peaks["backward"]}
    return {when: held.activations + held.other for when, held in moments.items()}


@functools.cache
def measured_optimizers() -> dict[str, tuple[float, float]]:
    """Optimizer -> (bytes of state, bytes that a step allocates and frees again), both for each
    parameter: of 16 fp32 matrices of equal size, on the CPU."""
    return launch(_optimizers, ranks=1, quiet=True, device="cpu")[0]


def _optimizers() -> dict[str, tuple[float, float]]:
    torch.set_num_threads(1)
    return {name: _step_of(make) for name, make in _MADE.items()}


def _step_of(make: Callable) -> tuple[float, float]:
    weights = [nn.Parameter(torch.ones(WIDTH, WIDTH)) for _ in range(TENSORS)]
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
    """(bytes of each allocation, in the order of time, negative where memory is freed; the result
    of work()). On a rank, because the profiler writes lines of its own to the process's output."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = work()
    events = sorted(((event.start_ns(), event.nbytes())
                     for event in recorded.profiler.kineto_results.events()
                     if event.name() == "[memory]"), key=lambda event: event[0])
    return [nbytes for _, nbytes in events], result


def left_for_backward(forward: Callable[[], torch.Tensor]) -> int:
    """Bytes that forward() allocates and that are still there when nothing is kept but the graph of
    its output; the output itself counts only if backward needs it. On a rank."""
    forward()  # some operations allocate memory for good when they run for the first time
    # The graph's last node keeps the graph, and does not keep the output.
    changes, graph = allocations_of(lambda: forward().grad_fn)
    del graph
    return sum(changes)
