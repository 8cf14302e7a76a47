"""A return value's way to the caller: in pieces, so that a large one needs no second copy."""

import io
import pickle
import sys

import cloudpickle
import torch

PIECE = 8_000_000  # bytes
ALONE = 1_000_000  # bytes from which a tensor or an array travels beside the pickle, uncopied


def pack(value) -> list:
    """The value as a pickle and the buffers of its large tensors and arrays."""
    buffers = []
    file = _Bytes()
    _Pickler(file, protocol=5, buffer_callback=lambda buffer: _set_aside(buffer, buffers)
             ).dump(value)
    return [memoryview(file.data), *buffers]


def dumps(value) -> bytes:
    """The value as one pickle."""
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def send(channel, progress, packed) -> None:
    """Sends what `pack` packed, and how far the rank had come."""
    channel.send("returning", (progress, [buffer.nbytes for buffer in packed]))
    for buffer in packed:
        for start in range(0, buffer.nbytes, PIECE):
            channel.send("piece", bytes(buffer[start:start + PIECE]))


class Incoming:
    """On the caller's side: a value that is still arriving."""

    def __init__(self, sizes):
        self.buffers = [bytearray(size) for size in sizes]
        self.total, self.received = sum(sizes), 0
        self._filled = 0  # buffers that are complete
        self._position = 0  # in the one that is being filled
        self._skip_empty()

    def take(self, piece) -> None:
        buffer = self.buffers[self._filled]
        buffer[self._position:self._position + len(piece)] = piece
        self._position += len(piece)
        self.received += len(piece)
        if self._position == len(buffer):
            self._filled, self._position = self._filled + 1, 0
            self._skip_empty()

    def _skip_empty(self):
        while self._filled < len(self.buffers) and not self.buffers[self._filled]:
            self._filled += 1

    @property
    def complete(self) -> bool:
        return self._filled == len(self.buffers)

    def value(self):
        head, *rest = self.buffers
        return pickle.loads(head, buffers=rest)


class _Bytes:
    def __init__(self):
        self.data = bytearray()

    def write(self, data):
        self.data += data


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, value):
        if type(value) is io.TextIOWrapper and value not in (sys.stdout, sys.stderr):
            raise TypeError("an open file stays where it is")  # cloudpickle would read all of it
        if type(value) is torch.Tensor and _travels_alone(value):
            flat = value.detach().reshape(-1).view(torch.uint8).numpy()
            return _tensor, (pickle.PickleBuffer(flat), value.dtype, value.shape,
                             value.requires_grad)
        return super().reducer_override(value)


def _travels_alone(tensor) -> bool:
    return (tensor.device.type == "cpu" and tensor.layout == torch.strided
            and not tensor.is_quantized and tensor.is_contiguous() and not tensor.is_conj()
            and not tensor.is_neg() and not tensor.__dict__
            and tensor.numel() * tensor.element_size() >= ALONE)


def _tensor(buffer, dtype, shape, requires_grad):
    return torch.frombuffer(buffer, dtype=dtype).view(shape).requires_grad_(requires_grad)


def _set_aside(buffer, buffers) -> bool:
    """Puts a large buffer aside; False (to pickle's question: keep it in?) when it was."""
    raw = buffer.raw()
    if raw.nbytes < ALONE:
        return True
    buffers.append(raw)
    return False
