"""Fake tensors (of a dry run) are on the CPU for C++ and on "cuda:k" for Python, as real ones here:
autograd's engine would else ask CUDA for a stream, which a CPU build of torch does not have."""

import torch

from pretend_gpus import state

_CPU = torch.device("cpu")


def patch(module):
    fake = module.FakeTensor
    original_new, original_device = fake.__new__, fake.device
    original_normalize = fake._normalize_fake_device
    original_convert = module.FakeTensorConverter.from_real_tensor
    converting = []  # a real tensor says "cuda" also where only a CPU's dry run meets it

    def __new__(cls, *args, **kwargs):
        made = original_new(cls, *args, **kwargs)
        if not converting and any(_is_cuda(value) for value in (*args, *kwargs.values())):
            made.fake_mode.pretend_cuda = True  # from now on all that are made in this mode
            made.fake_mode.cache_enabled = False  # all modes share it, by the device that is shown
        return made

    def from_real_tensor(self, *args, **kwargs):
        converting.append(True)
        try:
            return original_convert(self, *args, **kwargs)
        finally:
            converting.pop()

    def device(self):
        found = original_device.__get__(self)
        on_gpu = found.type == "cpu" and getattr(self.fake_mode, "pretend_cuda", False)
        return torch.device("cuda", state.current_or_zero()) if on_gpu else found

    module.FakeTensorConverter.from_real_tensor = from_real_tensor
    fake.__new__, fake.device = staticmethod(__new__), property(device)
    fake._normalize_fake_device = staticmethod(
        lambda device: _CPU if _is_cuda(device) else original_normalize(device))


def _is_cuda(value):
    return isinstance(value, (str, torch.device)) and torch.device(value).type == "cuda"
