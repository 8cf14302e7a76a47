"""AdamW updates shards as plain tensors: the same kernels on the same memory. Else each rank would
compute for a second at its first step how DTensor's rules apply to lists of tensors."""

import functools


def patch(module):
    original = module.adam

    @functools.wraps(original)
    def adam(*lists, **options):
        return original(*([getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
                          for tensors in lists), **options)

    module.adam = adam
