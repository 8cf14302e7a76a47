"""FSDP1 takes a GPU's number; torch makes a device of it only where there is an accelerator."""

import torch


def patch(module):
    original = module.FullyShardedDataParallel.__init__

    def __init__(self, *args, device_id=None, **kwargs):
        if isinstance(device_id, int):
            device_id = torch.device("cuda", device_id)
        original(self, *args, device_id=device_id, **kwargs)

    module.FullyShardedDataParallel.__init__ = __init__
