"""What is copied between a GPU and its host: the bytes of every copy that torch makes."""

from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


@dataclass(eq=False)
class HostCopies(TorchDispatchMode):
    """Inside `with`: counts the bytes that are copied between this rank's device and the CPU, in
    autograd's threads too. What a library copies beside torch, as gloo does, is not seen.

    device: the other end, "cuda" by default. to_device, to_host: bytes.
    """

    device: str = "cuda"
    to_device: int = 0
    to_host: int = 0

    def __post_init__(self):
        super().__init__()

    @property
    def bytes(self) -> int:
        """In both directions together."""
        return self.to_device + self.to_host

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if function in _COPIES:
            # _to_copy(source), copy_(target, source)
            source = args[function is _COPIES[1]]  # copy_(target, source)
            self._count(source.device.type, found.device.type, found.nbytes)
        return found

    def _count(self, source, target, nbytes):
        if (source, target) == ("cpu", self.device):
            self.to_device += nbytes
        elif (source, target) == (self.device, "cpu"):
            self.to_host += nbytes
