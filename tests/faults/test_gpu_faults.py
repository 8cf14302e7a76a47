"""Every fault of the table for GPUs, on this machine's GPUs; conftest sees that nothing is left."""

import time

import pytest
from faults import on_gpus

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.mark.parametrize("fault", on_gpus.FAULTS, ids=lambda fault: fault.name)
def test_a_fault_on_gpus(fault, next_launch_works):
    if why := on_gpus.cannot(fault):
        pytest.skip(why)
    began = time.monotonic()
    shown = on_gpus.shown(fault)
    assert time.monotonic() - began < fault.within, shown
    for piece in (*fault.message_parts, f"{fault.error}: "):
        assert piece in shown, shown
