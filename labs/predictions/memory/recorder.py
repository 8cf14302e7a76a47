"""Runs one step of a model with fake tensors and logs its allocations, block by block."""

import contextlib
from dataclasses import dataclass
from unittest import mock

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import checkpoint
from torch.utils._pytree import tree_map

from labs.predictions.dryrun import fake, jobs, kernels
from labs.predictions.dryrun.trace import first_differentiable, label_gradients
from labs.predictions.dryrun.tracker import Tracker
from labs.predictions.memory import losses, model_sizes
from labs.training.models import blocks

LAYERS = 4  # recorded of a model with more: the first, two in the middle, which are alike, the last
OUTSIDE, HEAD = -1, -2
_PLACES = {"outside": OUTSIDE, "head": HEAD}
CHECKPOINTING = ("none", "selective", "full")
LOSSES = ("fp32", "bf16", "fused")
ATTENTIONS = ("sdpa", "eager")
PRECISIONS = {4: "fp32", 2: "bf16"}


@dataclass(frozen=True)
class Mode:
    """What decides, apart from the model, which operations a step consists of.

    compute: bytes of an element of the activations. checkpointing: "none", "selective" (the inside
    of attention is computed again) or "full" (each block is). attention: "sdpa" or "eager". device:
    "cpu" or "cuda". mixed: each block casts its inputs, as under FSDP2's mixed precision. loss:
    "fp32", "bf16" or "fused" (losses.py).
    """

    compute: int
    checkpointing: str
    attention: str
    device: str
    mixed: bool = False
    loss: str = "fp32"

    def __post_init__(self):
        for name, known in (("checkpointing", CHECKPOINTING), ("attention", ATTENTIONS),
                            ("loss", LOSSES), ("device", jobs.DEVICES)):
            if getattr(self, name) not in known:
                raise ValueError(f"no {name} {getattr(self, name)!r}: choose {', '.join(known)}")


class Recorder(Tracker):
    """Records one step at one point: operators' scratch space as their dimensions, not as bytes.

    A CPU build of torch cannot run backward on fake tensors of a GPU. A GPU's step is therefore
    recorded with the CPU's operators, except for what `_as_on_a_gpu` and `_follow` replace:
    dropout, fused attention, a norm's statistics. That is within 1 % of what an H200's allocator
    counted in 17 jobs (tests/predictions/test_on_a_real_gpu.py).
    """

    def __init__(self, mode: Mode, point: model_sizes.Point):
        super().__init__()
        self._mode, self._point = mode, point
        self._gpu = mode.device == "cuda"
        self._numbers = []

    def record(self) -> tuple[tuple, list[int]]:
        """(what was recorded, with indices in place of numbers; the numbers)."""
        self._point.config._attn_implementation = self._mode.attention
        values = self._point.values
        job = jobs.DryRunJob(self._point.config, batch=values["batch"], sequence=values["sequence"],
                       precision=PRECISIONS[self._mode.compute],
                       checkpointing="full" if self._mode.checkpointing == "full" else "none")
        with fake.refusals_explained(), fake.tensors(self), self._patched():
            model = jobs.build(job)
            model.config.use_cache = bool(getattr(self._point.config, "use_cache", False)
                                          and self._mode.checkpointing != "full")
            losses.replace(model, self._mode.loss)
            events = self._step(job, model)
        return self._shape(model, events), self._numbers

    def _step(self, job, model) -> list:
        """The events of one step, the batch and the loss still held."""
        data = jobs.batch(job, model)
        for index, block in enumerate(blocks(model)):
            self._mark_block(block, index, len(blocks(model)))
        label_gradients(model, self)
        begin = len(self.events)
        self.mark(("forward", "outside"))
        loss = jobs.forward(job, model, data)
        self.mark(("backward", "head"))
        loss.backward()
        return self.events[begin:]

    def _mark_block(self, block, index, count):
        """Marks when forward enters a block and leaves the last; in backward, when the gradient of
        a block's output is there, and after the first block, that of its input."""
        def enter(module, args, kwargs):
            # Checkpointing calls forward again while autograd's graph task runs.
            if torch._C._current_graph_task_id() == -1:
                self.mark(("forward", index))
                if index == 0:
                    self._mark_gradient((args, kwargs), "outside")
            return tree_map(_cast, (args, kwargs)) if self._mode.mixed else None

        def leave(module, args, output):
            if torch._C._current_graph_task_id() != -1:
                return
            self._mark_gradient(output, index)
            if index == count - 1:
                self.mark(("forward", "head"))

        block.register_forward_pre_hook(enter, with_kwargs=True)
        block.register_forward_hook(leave)

    def _mark_gradient(self, value, place):
        first_differentiable(value).register_hook(lambda _: self.mark(("backward", place)))

    @contextlib.contextmanager
    def _patched(self):
        with contextlib.ExitStack() as stack:
            if self._gpu:
                stack.enter_context(_as_on_a_gpu())
            if self._mode.checkpointing == "selective":
                stack.enter_context(_attention_checkpointed(self._mode))
            yield

    def _inside(self, func, args, kwargs, result):
        self._scratch = None if self._gpu else kernels.scratch(func, args)
        return 0, result

    def _follow(self, func, args, kwargs, result):
        super()._follow(func, args, kwargs, result)
        if self._scratch:
            self.mark(self._scratch)
        if self._gpu and func is torch.ops.aten.native_layer_norm.default:
            for statistic in result[1:]:  # a GPU keeps them in fp32
                self.see(statistic, 4 * statistic.numel())
        return result

    def see(self, tensor, size=None):
        if self._gpu and type(tensor) is torch.Tensor:  # a state of the CPU's generator: no fake
            return None
        return super().see(tensor, size)

    def _shape(self, model, events) -> tuple:
        """(layers, segments, scratch, parameters, buffers), with indices in place of numbers."""
        found = blocks(model)
        owner = {id(p): index for index, block in enumerate(found) for p in block.parameters()}
        parameters = [(owner.get(id(p)), self._all(p.shape)) for p in model.parameters()]
        buffers = [self._number(buffer.nbytes) for buffer in model.buffers()]
        segments, scratch, origin = {}, [], {}
        for key, value in events:
            if isinstance(value, tuple):
                rows, here = segments.setdefault(value, []), _PLACES.get(value[1], value[1])
            elif isinstance(value, kernels.Scratch):
                rows.append((0, 0, False, len(scratch), here))
                scratch.append((value.rule, self._all(value.sizes), value.element))
            else:
                gradient = value > 0 and self.labels.get(key) == "gradients"
                rows.append((self._number(abs(value)), 1 if value > 0 else -1, gradient, -1,
                             origin.setdefault(key, here)))
        return len(found), segments, scratch, parameters, buffers

    def _all(self, numbers) -> tuple[int, ...]:
        return tuple(map(self._number, numbers))

    def _number(self, value: int) -> int:
        """Appends a number and returns its index."""
        self._numbers.append(int(value))
        return len(self._numbers) - 1


def _cast(value):
    """FSDP2 casts a unit's floating inputs (MixedPrecisionPolicy, cast_forward_inputs): some models
    pass rotary embeddings in fp32."""
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(torch.bfloat16) if floating else value


@contextlib.contextmanager
def _as_on_a_gpu():
    """Replaces the CPU's dropout by a GPU's: alone it saves a boolean mask; in fused attention it
    is part of the kernel and saves nothing. And fused attention, where a GPU has none."""
    attend = F.scaled_dot_product_attention

    def dropout(x, p=0.5, training=True, inplace=False):
        return torch.native_dropout(x, p, True)[0] if training and p else x

    def attention(query, *args, dropout_p=0.0, enable_gqa=False, **kwargs):
        # FlashAttention does not run in fp32, and the memory-efficient kernel takes no grouped
        # keys: a GPU then computes the whole scores, and keeps them for backward.
        whole = enable_gqa and query.dtype == torch.float32
        with sdpa_kernel(SDPBackend.MATH) if whole else contextlib.nullcontext():
            return attend(query, *args, enable_gqa=enable_gqa, **kwargs)

    with (mock.patch.object(F, "dropout", dropout),
          mock.patch.object(F, "scaled_dot_product_attention", attention)):
        yield


def _attention_checkpointed(mode):
    """Attention between its inputs and its output is computed again in backward, unless it is
    fused: then it keeps no scores anyway. On the CPU, SDPA with dropout is not fused (ATen,
    sdp_utils_cpp)."""
    from transformers.modeling_utils import AttentionInterface

    original = AttentionInterface.get_interface

    def get_interface(self, name, default):
        function = original(self, name, default)

        def attention(*args, **kwargs):
            if mode.attention == "sdpa" and (mode.device == "cuda" or not kwargs.get("dropout")):
                return function(*args, **kwargs)
            return checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)
        return attention

    return mock.patch.object(AttentionInterface, "get_interface", get_interface)
