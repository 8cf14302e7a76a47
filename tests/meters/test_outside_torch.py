"""What is held outside torch's allocator is seen to the byte, whatever holds it."""

import copy
import io
import mmap
import pickle

import pytest
import torch

from labs.meters.outside_torch import OutsideTorch

N = 10_000
NUMBERS = torch.arange(float(N))


def saved():
    file = io.BytesIO()
    torch.save(NUMBERS, file)
    return file


OUTSIDE = {
    "NumPy array": lambda: NUMBERS.numpy().copy(),
    "result of NumPy": lambda: NUMBERS.numpy() * 2,
    "copied by copy": lambda: copy.deepcopy(NUMBERS.numpy()),
    "bytes": lambda: NUMBERS.numpy().tobytes(),
    "pickled": lambda: pickle.dumps(NUMBERS),
    "saved": saved,
    "list": lambda: NUMBERS.tolist(),
    "tensor over a bytearray": lambda: torch.frombuffer(bytearray(4 * N), dtype=torch.float32),
    "anonymous mapping": lambda: mmap.mmap(-1, 4 * N),
    "shared memory": lambda: NUMBERS.clone().share_memory_(),
}
INSIDE = {"nothing": lambda: None, "a tensor": lambda: NUMBERS.clone(),
          "a view": lambda: NUMBERS.numpy(), "small things": lambda: [{i: [i]} for i in range(20)]}


@pytest.mark.parametrize("make", OUTSIDE.values(), ids=OUTSIDE)
def test_what_is_outside_is_counted_while_it_is_held(make):
    with OutsideTorch() as outside:
        thing = make()
        held = outside.held()
        del thing
        after = outside.held()
    assert 4 * N <= held.bytes < 8 * N + 10_000 and after.bytes < N


@pytest.mark.parametrize("make", INSIDE.values(), ids=INSIDE)
def test_nothing_else_is_counted(make):
    with OutsideTorch() as outside:
        thing = make()
        assert outside.held().bytes == 0
    del thing


def test_the_line_that_holds_most_is_named():
    with OutsideTorch() as outside:
        small = NUMBERS[:200].numpy().copy()
        large = NUMBERS[:2000].numpy().copy()
        held = outside.held()
    assert held.place.source == "large = NUMBERS[:2000].numpy().copy()" and held.bytes == 8800
    assert len(small) + len(large) == 2200
