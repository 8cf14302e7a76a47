"""The training job of a dry run: model, strategy and batch; real ranks build it with the same code.
"""

import contextlib
import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from labs.training.models import blocks

PRECISIONS = ("fp32", "bf16", "mixed")
STRATEGIES = ("plain", "ddp", "fsdp2")
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class DryRunJob:
    """One training job as `dry_run` describes it; `layers` cuts the model to its first blocks."""

    model: Any
    ranks: int = 1
    strategy: Any = "plain"
    batch: int = 1
    sequence: int = 128
    precision: str = "fp32"
    checkpointing: str = "none"
    optimizer: Any = torch.optim.AdamW
    inputs: Any = None
    layers: int = None
    options: dict = field(default_factory=dict)
    device: str = "cpu"
    loop: Callable = None

    def __post_init__(self):
        _check_choice("precision", self.precision, PRECISIONS)
        _check_choice("checkpointing", self.checkpointing, ("none", "full"))
        _check_choice("device", self.device, DEVICES)
        if not callable(self.strategy):
            _check_choice("strategy", self.strategy, STRATEGIES)
        if self.loop is not None and not callable(self.loop):
            raise TypeError(f"loop={self.loop!r}: give a function (module, optimizer, batch) that "
                            "trains one step")
        if self.strategy == "plain" and self.ranks != 1:
            raise ValueError(f"ranks={self.ranks}: plain training has 1 rank; name a strategy")


def _check_choice(name, value, choices):
    if value not in choices:
        raise ValueError(f"{name}={value!r}: choose {', '.join(choices)}")


def build(job: DryRunJob, device: str | None = None) -> nn.Module:
    """The model, in training mode, with the job's precision, blocks and checkpointing. device: if
    not the job's, such as "meta" for a model without memory, of which shards are allocated later.
    """
    dtype = torch.bfloat16 if job.precision == "bf16" else torch.float32
    with torch.device(device or job.device):
        model = _instantiate(job, dtype).train()
    _check_eager(model)
    if job.layers is not None:
        found = blocks(model)
        del found[job.layers:]
    if job.checkpointing == "full":
        _checkpoint(model)
    return model


def _check_eager(model):
    for name, module in model.named_modules():
        compiled = type(module).__name__ == "OptimizedModule"
        if compiled or getattr(module, "_compiled_call_impl", None) is not None:
            raise RuntimeError(f"{name or 'The model'} is compiled (torch.compile): its compiler "
                               "plans its memory, which a dry run cannot know; leave that out, or "
                               "measure on real ranks instead")


def _instantiate(job, dtype):
    if not hasattr(job.model, "to_dict"):
        with _default(dtype):
            return job.model()
    from transformers import AutoModelForCausalLM

    if type(job.model) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(f"{type(job.model).__name__} is no decoder's: give a function that makes "
                         "the model, and inputs=, one that makes a batch")
    model = AutoModelForCausalLM.from_config(_with_layers(job.model, job.layers), dtype=dtype)
    model.loss_type = "ForCausalLM"
    return model


@contextlib.contextmanager
def _default(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _with_layers(config, layers):
    """The configuration with fewer layers, without a cache, which training does not need."""
    config = copy.deepcopy(config)
    config.use_cache = False
    if layers is not None:
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
    return config


def _checkpoint(model):
    if hasattr(model, "gradient_checkpointing_enable"):
        with warnings.catch_warnings():  # transformers 5 has a new name for it, 4 has not
            warnings.simplefilter("ignore", FutureWarning)
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    found = blocks(model)
    for index, block in enumerate(found):
        found[index] = checkpoint_wrapper(block)


def wrap(job: DryRunJob, model: nn.Module, mesh=None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """(module, optimizer) of this rank under the job's strategy."""
    if callable(job.strategy):
        return job.strategy(model, job.optimizer, **job.options)
    module = _WRAPPERS[job.strategy](job, model, mesh)
    return module, job.optimizer(module.parameters(), lr=1e-3)


def _plain(job, model, mesh):
    return model


def _ddp(job, model, mesh):
    """On a fake process group the initial parameters are not broadcast: nothing would arrive."""
    fake = dist.get_backend() == "fake"
    return nn.parallel.DistributedDataParallel(model, init_sync=not fake, **job.options)


def _fsdp2(job, model, mesh):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    options = {"mesh": mesh, **job.options}
    if job.precision == "mixed":
        options.setdefault("mp_policy", MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    for block in blocks(model):
        fully_shard(block, **options)
    return fully_shard(model, **options)


_WRAPPERS = {"plain": _plain, "ddp": _ddp, "fsdp2": _fsdp2}


def batch(job: DryRunJob, model: nn.Module) -> dict[str, torch.Tensor]:
    """One batch of one rank: token numbers and labels, int64, (batch, sequence)."""
    with torch.device(job.device):
        if job.inputs is not None:
            return job.inputs()
        # (batch, sequence); token 0 is in every vocabulary: real ranks look it up.
        ids = torch.zeros(job.batch, job.sequence, dtype=torch.int64)
        return {"input_ids": ids, "labels": ids.clone()}


def forward(job: DryRunJob, module: nn.Module, data: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss; under autocast where the strategy has no mixed precision of its own."""
    if job.precision == "mixed" and job.strategy != "fsdp2":
        with torch.autocast(job.device, torch.bfloat16):
            return module(**data).loss
    return module(**data).loss


def step(job: DryRunJob, module: nn.Module, optimizer: torch.optim.Optimizer,
         data: dict[str, torch.Tensor]) -> None:
    """Trains one step: by the job's own loop, or by the plain one."""
    if job.loop is not None:
        job.loop(module, optimizer, data)
        return
    loss = forward(job, module, data)
    loss.backward()
    del loss
    optimizer.step()
    optimizer.zero_grad()
