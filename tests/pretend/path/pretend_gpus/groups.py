"""torch.distributed: NCCL is asked for, and gloo carries the tensors, which are on the CPU."""

import os
import time

import torch

from pretend_gpus import machine, state


class ProcessGroupNCCL:
    """Only a name, of which no process group is an instance."""

    class Options:
        def __init__(self, is_high_priority_stream=False):
            self.is_high_priority_stream = is_high_priority_stream
            self.config = type("Config", (), {})()


def patch(module):
    """Replaces what makes process groups; `get_backend` says what was asked for."""
    original_init, original_new = module.init_process_group, module._new_group_with_tag
    original_backend = module.ProcessGroup._get_backend
    original_check, original_destroy = module._check_single_tensor, module.destroy_process_group
    module._NCCL_AVAILABLE = True
    module.ProcessGroupNCCL = ProcessGroupNCCL
    module.__all__ += ["ProcessGroupNCCL"]

    def say(group, asked):
        if group is module.GroupMember.NON_GROUP_MEMBER or group not in module._world.pg_map:
            return
        store = module._world.pg_map[group][1]
        module._world.pg_map[group] = (module.Backend(asked), store)
        module._world.pg_backend_config[group] = str(module.BackendConfig(module.Backend(asked)))

    def init_process_group(backend=None, *args, device_id=None, **kwargs):
        _log(backend, kwargs)
        if backend is not None and "nccl" not in backend.lower():
            return original_init(backend, *args, **kwargs)
        if not machine.count():
            raise ValueError("ProcessGroupNCCL is only supported with GPUs, no GPUs found!")
        kwargs.pop("pg_options", None)
        original_init("gloo", *args, **kwargs)
        if module.get_world_size() > machine.count():
            raise _duplicate()
        say(module.GroupMember.WORLD, backend or "cpu:gloo,cuda:nccl")

    def _new_group_with_tag(ranks=None, timeout=None, backend=None, backend_options=None,
                            pg_tag=None, use_local_synchronization=False, group_desc=None,
                            device_id=None, **others):
        asked = backend or str(module.get_backend())
        if "nccl" not in asked.lower():
            return original_new(ranks, timeout, backend, backend_options, pg_tag,
                                use_local_synchronization, group_desc, device_id, **others)
        group = original_new(ranks, timeout, "gloo", None, pg_tag, use_local_synchronization,
                             group_desc, None, **others)
        say(group, asked)
        return group

    def _get_backend(group, device):
        return original_backend(group, torch.device("cpu"))

    def _check_single_tensor(param, param_name):
        original_check(param, param_name)
        # each rank has a GPU of its own, so this one is another rank's
        if param.device.type == "cuda" and param.device.index != state.current and \
                module.get_world_size() > 1 and "nccl" in str(module.get_backend()).lower():
            raise _duplicate()

    def destroy_process_group(group=None):
        # A script's rank ends next. Where cores are busy, gloo's thread may not have dropped its
        # reference to the last tensor yet: it then waits for an interpreter that ends, which ends
        # the thread inside of C++, and the rank, "terminate called without an active exception".
        if os.environ.get("TORCHELASTIC_RUN_ID"):
            time.sleep(0.2)
        original_destroy(group)

    module._check_single_tensor = _check_single_tensor
    module.destroy_process_group = destroy_process_group
    module.init_process_group, module._new_group_with_tag = init_process_group, _new_group_with_tag
    module.ProcessGroup._get_backend = _get_backend


def _log(backend, options):
    """Adds a line to the file PRETEND_RANKS: rank, ranks, device and backend of a launch's rank."""
    path, device = os.environ.get("PRETEND_RANKS"), os.environ.get("LABS_DEVICE")
    if path and device and backend != "fake":
        with open(path, "a") as file:
            file.write(f"{options.get('rank')} {options.get('world_size')} {device} {backend}\n")


def _duplicate():
    return torch.distributed.DistBackendError(
        "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3690, "
        "invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.27.7\n"
        "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
        "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 7000")
