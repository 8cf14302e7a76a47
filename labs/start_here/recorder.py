"""On a rank: notes every collective that is called, and what each left behind."""

import torch
import torch.distributed as dist

from labs.meters.traffic import Traffic
from labs.start_here import answers

_SIZED = {"_reduce_scatter_base_": "reduce_scatter_tensor",
          "_allgather_base_": "all_gather_into_tensor"}  # take (output, input)


class Recorder(Traffic):
    """A Traffic that also copies tensors.

    left[k] is what the k-th collective left on this rank, flat. copies holds `watched` as it was
    before each send. A collective whose output does not fit its input raises Wrong. It waits for
    every collective, so it must not be used to measure time.
    """

    def __init__(self, watched=None):
        super().__init__()
        self.watched, self.copies, self.left, self.functional = watched, [], [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        known = len(self.calls)
        if function.namespace == "_c10d_functional" and "wait" not in function.__name__:
            self.functional.append(function.__name__.split(".")[0])
        if function.namespace == "c10d" and function.__name__.startswith("send"):
            self.copies += [self.watched.clone()] if self.watched is not None else []
        if name := _SIZED.get(function._schema.name.removeprefix("c10d::")):
            answers.must_fit(name, args[0].numel(), args[1].numel(), dist.get_world_size())
        result = super().__torch_dispatch__(function, types, args, kwargs)
        if self.calls[known:] and self.calls[-1].kind not in ("send", "recv"):
            _wait(result)
            tensors = [t.detach().reshape(-1).clone() for t in _flat(args[0])]
            self.left.append(torch.cat(tensors))
        return result

    @property
    def names(self) -> list:
        """The collectives that were called, by whatever name they were reached."""
        return [call.kind for call in self.calls] + self.functional


def _wait(result):
    work = result[-1] if isinstance(result, tuple) else result
    if hasattr(work, "wait"):
        work.wait()


def _flat(value) -> list:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in value for tensor in _flat(part)]
