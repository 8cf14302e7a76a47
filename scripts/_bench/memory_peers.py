"""Other people's estimates of a training job's memory, each asked as its users would ask it."""

import contextlib
import functools
import importlib.util
import os
import tempfile
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh

from _bench.deepspeed_estimates import model_states
from _bench.memory_measured import fake_ranks, in_fresh_process
from labs.predictions.dryrun import fake, jobs


class Cannot(Exception):
    """This method does not claim to do this case, and says why."""


def mem_tracker(case, device) -> int:
    """torch's MemTracker around two steps with fake tensors."""
    if case.strategy == "fsdp2":
        raise Cannot("does not follow FSDP2: FSDPMemTracker does")
    return in_fresh_process(_tracked, case, device)


def fsdp_mem_tracker(case, device) -> int:
    """torch's FSDPMemTracker around two steps with fake tensors in a fake process group."""
    if case.strategy != "fsdp2":
        raise Cannot("follows FSDP2 only")
    return in_fresh_process(_tracked, case, device)


def _tracked(case, device) -> int:
    job = replace(case.job, device=device)
    with fake_ranks(job), fake.whole_sequences():
        mesh = init_device_mesh(device, (job.ranks,)) if job.strategy == "fsdp2" else None
        with FakeTensorMode():
            module, optimizer = jobs.wrap(job, jobs.build(job), mesh)
            data = jobs.batch(job, None)
            tracker = _tracker(module, optimizer, data)
            with tracker:
                for _ in range(2):
                    jobs.forward(job, module, data).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    tracker.reset_mod_stats()
    snapshot = tracker.get_tracker_snapshot("peak")
    return sum(held["Total"] for place, held in snapshot.items() if place.type == device)


def _tracker(module, optimizer, data):
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.distributed.fsdp import FSDPModule

    if isinstance(module, FSDPModule):
        tracker = FSDPMemTracker(module, optimizer)
        tracker.track_inputs(tuple(data.values()))
        return tracker
    tracker = MemTracker()
    tracker.track_external(module, optimizer, *data.values())
    return tracker


def deepspeed(case, device) -> int:
    """DeepSpeed's figure per GPU without offload, from the model itself."""
    return _deepspeeds(case)[1]


def deepspeed_with_cpu(case, device) -> int:
    """The same with a rank's share of its figure for the CPU, where the model is made."""
    cpu, gpu = _deepspeeds(case)
    return gpu + cpu // case.ranks


def _deepspeeds(case) -> tuple:
    if not importlib.util.find_spec("deepspeed"):
        raise Cannot("not installed: pip install 'data-parallel-workbook[third-party]' adds "
                     "DeepSpeed")
    if case.strategy != "fsdp2":
        raise Cannot("estimates ZeRO-2 and ZeRO-3 only")
    return _asked(case)


@functools.cache
def _asked(case) -> tuple:
    return in_fresh_process(_deepspeed, case)


def _deepspeed(case) -> tuple:
    """(bytes of the node's CPU, bytes of each GPU)."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with contextlib.redirect_stdout(None):
        from deepspeed.runtime.zero.stage3 import model_to_params
    total, largest = model_to_params(jobs.build(case.job))
    return model_states(total, largest, case.ranks, stage=3 if case.reshard else 2)


def accelerate(case, device) -> int:
    """The "Training using Adam" of `accelerate estimate-memory`."""
    if case.strategy == "fsdp2":
        raise Cannot("knows no sharding")
    return in_fresh_process(_accelerate, case)


def _accelerate(case) -> int:
    """The command's own code; only its question to the Hub is answered here."""
    from accelerate.commands import estimate
    from transformers.utils import logging

    logging.set_verbosity_error()
    known = SimpleNamespace(config={}, library_name="transformers")
    with (tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(None),
          mock.patch.object(estimate, "verify_on_hub", lambda *_: known)):
        case.config.save_pretrained(directory)
        asked = estimate.estimate_command_parser().parse_args(
            [directory, "--dtypes", "float32" if case.precision == "fp32" else "float16"])
        (row,) = estimate.gather_data(asked)
    return int(max(row[3].values()))
