"""AdamW updates shards as plain tensors, by the same kernels on the same memory: else each rank
computes for seconds how DTensor's rules apply to lists of tensors."""

import functools


def patch(module):
    original = module.Adam._init_group

    @functools.wraps(original)
    def _init_group(self, group, *lists):
        found = original(self, group, *lists)
        for tensors in lists:
            tensors[:] = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
        return found

    module.Adam._init_group = _init_group
