"""DeepSpeed's own estimates of the bytes of a job's model states."""

import contextlib
import os


def model_states(total: int, largest: int, ranks: int, stage: int) -> tuple[int, int]:
    """(bytes of the node's CPU, bytes of each GPU) without offload, of a model of `total`
    parameters whose largest layer has `largest`. ZeRO-1 and ZeRO-2 have one estimate."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with contextlib.redirect_stdout(None):
        from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as stage3
        from deepspeed.runtime.zero.stage_1_and_2 import (
            estimate_zero2_model_states_mem_needs as stage2,
        )
    if stage == 3:
        return stage3(total, largest, ranks, cpu_offload=False, cpu_offload_params=False)[:2]
    return stage2(total, ranks, cpu_offload=False)
