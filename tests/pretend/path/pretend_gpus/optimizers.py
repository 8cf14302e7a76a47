"""AdamW's foreach form updates shards as plain tensors: the same kernels on the same memory. Else
each rank would compute for a second at its first step how DTensor's rules apply to lists."""

import functools


def patch(module):
    original = module._multi_tensor_adam  # not `adam`, which TorchScript reads

    @functools.wraps(original)
    def _multi_tensor_adam(*lists, **options):
        return original(*([getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
                          for tensors in lists), **options)

    module._multi_tensor_adam = _multi_tensor_adam
