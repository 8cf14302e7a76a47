"""What ranks record for the charts of notebook 04. Those are elsewhere, because ranks import what
they run, and need no matplotlib."""

from torch.utils.flop_counter import FlopCounterMode

from labs.workers import cuda, devices


def count_operations(module, optimizer, batch) -> int:
    """On a rank: returns the operations of matrix products in forward and backward of one batch."""
    with FlopCounterMode(display=False) as counter:
        module(**batch).loss.backward()
    optimizer.zero_grad()
    return counter.get_total_flops()


def pinned_bytes(module, optimizer, batch) -> int:
    """On a rank: returns the bytes of pinned memory; a CPU has no need of it."""
    return 0 if devices.device().type == "cpu" else cuda.pinned_memory()
