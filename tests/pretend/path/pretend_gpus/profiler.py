"""torch.profiler: takes ProfilerActivity.CUDA, says of allocations that they are on the GPU, and
adds kernels to the traces that it writes."""

import torch

from pretend_gpus import state, trace


def patch(module):
    kineto = module._KinetoProfile
    original_init, original_export = kineto.__init__, kineto.export_chrome_trace
    supported = module.supported_activities
    gpu = torch.profiler.ProfilerActivity.CUDA if hasattr(torch, "profiler") else None
    gpu = gpu or torch._C._profiler.ProfilerActivity.CUDA

    def __init__(self, *, activities=None, **kwargs):
        chosen = set(activities) if activities else module.supported_activities()
        self.pretend_cuda = gpu in chosen
        original_init(self, activities=chosen - {gpu}, **kwargs)

    def export_chrome_trace(self, path):
        result = original_export(self, path)
        if self.pretend_cuda and state.current is not None:
            trace.add_kernels(path, state.current, _has_nccl())
        return result

    kineto.__init__, kineto.export_chrome_trace = __init__, export_chrome_trace
    module.supported_activities = lambda: supported() | {gpu}
    _show_devices()


def _has_nccl():
    """Whether NCCL carries this process's tensors, or would."""
    group = torch.distributed
    return not group.is_initialized() or "nccl" in str(group.get_backend())


def _show_devices():
    allocation = torch._C._profiler._ExtraFields_Allocation
    original = allocation.device

    def device(self):
        found = original.__get__(self)
        on_gpu = found.type == "cpu" and state.current is not None
        return torch.device("cuda", state.current) if on_gpu else found

    allocation.device = property(device)
