"""A fake process group, fake tensors, and the patches of torch and transformers that they need."""

import contextlib
import traceback
import unittest.mock
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)

from labs.predictions.dryrun import patches


@contextlib.contextmanager
def refusals_explained() -> Iterator[None]:
    """Raises RuntimeError, with the operator and the line that called it, where a job looks at a
    tensor's numbers or runs an operator without a fake kernel. The log entries in which torch
    prints the failed operator's stack are left out."""
    try:
        with unittest.mock.patch.object(fake_tensor.log, "disabled", True):
            yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise RuntimeError(
            f"This model looks at the numbers in a tensor ({error.func}{_caller(error)}), and in a "
            "dry run there are none: measure it on real ranks instead") from error
    except UnsupportedOperatorException as error:
        raise RuntimeError(f"Nobody has said what {error.func} returns without its numbers"
                           f"{_caller(error)}: measure it on real ranks instead") from error


_OWN = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "labs/meters")


def _caller(error) -> str:
    """Where a job's own code or a model's library called the operator."""
    frames = [f for f in traceback.extract_tb(error.__traceback__)
              if not any(part in f.filename for part in _OWN)]
    if not frames:
        return ""
    last = frames[-1]
    return f", called at {Path(last.filename).name} line {last.lineno}: {last.line}"


@contextlib.contextmanager
def ranks(count: int) -> Iterator[None]:
    """Opens a process group of `count` ranks in which this process is rank 0 and the others do not
    exist. Raises RuntimeError inside a real process group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("A dry run makes a fake process group, and this process is already in a "
                           "real one: call dry_run outside launch, or destroy the group first")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def tensors(tracker) -> Iterator[None]:
    """Makes every tensor created inside a fake one, and logs it with `tracker`."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_random_states(tracker))
        stack.enter_context(patches.patched(tracker))
        stack.enter_context(whole_sequences())
        stack.enter_context(_lazy_chunks())
        stack.enter_context(_shape_propagation_untracked(tracker))
        # The tracker is entered last, so it is the innermost mode and sees each operator first.
        stack.enter_context(FakeTensorMode())
        stack.enter_context(tracker)
        yield


@contextlib.contextmanager
def _random_states(tracker):
    """Checkpointing keeps the generator's state for each layer; reading it bypasses the dispatcher,
    so that the tracker would miss it."""
    original = torch.random.get_rng_state

    def get_rng_state():
        state = original()
        tracker.see(state)
        return state

    with (unittest.mock.patch.object(torch.random, "get_rng_state", get_rng_state),
          unittest.mock.patch.object(torch, "get_rng_state", get_rng_state)):
        yield


@contextlib.contextmanager
def whole_sequences() -> Iterator[None]:
    """Tells transformers that no sequences are packed into one. It would look at the positions'
    numbers, which fake tensors do not have; for unpacked batches its function returns None."""
    try:
        from transformers import masking_utils
        original = masking_utils.find_packed_sequence_indices
    except (ImportError, AttributeError):
        yield
        return

    def find(position_ids):
        original(position_ids)

    with unittest.mock.patch.object(masking_utils, "find_packed_sequence_indices", find):
        yield


@contextlib.contextmanager
def _shape_propagation_untracked(tracker):
    """DTensor computes the shapes of results with fake tensors, which no real run allocates."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    name = "_propagate_tensor_meta_non_cached"
    original = getattr(ShardingPropagator, name, None)
    if original is None:
        yield
        return

    def propagate(*args, **kwargs):
        with tracker.paused():
            return original(*args, **kwargs)

    with unittest.mock.patch.object(ShardingPropagator, name, propagate):
        yield


@contextlib.contextmanager
def _lazy_chunks():
    """FSDP2 cuts each parameter into a view per rank and keeps one: 1024 views take 0.3 s."""
    try:
        from torch.distributed.fsdp._fully_shard import _fsdp_param
        _fsdp_param._chunk_with_empty  # noqa: B018
    except (ImportError, AttributeError):
        yield
        return
    with unittest.mock.patch.object(_fsdp_param, "_chunk_with_empty", _Chunks):
        yield


class _Chunks:
    """torch.chunk's parts, each created on access; past the end they are empty."""

    def __init__(self, tensor, number, dim):
        self._tensor, self._dim = tensor, dim
        self._each = -(-tensor.size(dim) // number)

    def __getitem__(self, index):
        start, size = index * self._each, self._tensor.size(self._dim)
        if start >= size:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(self._each, size - start))
