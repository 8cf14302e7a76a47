"""A machine with GPUs that is not there: patches torch right after its import.

Tensors live on the CPU, and gloo carries them; tests/pretend/README.md says what that shows.
"""

import sys
from importlib import import_module

from import_hooks import spec_by_others

from pretend_gpus import quick

# module that is imported -> our module whose `patch(module)` is called right after
PATCHES = {
    "torch.cuda": "cuda",
    "torch.distributed.distributed_c10d": "groups",
    "torch.distributed.tensor._random": "dtensor",
    "torch.optim.adam": "optimizers",
    "torch.distributed.fsdp.fully_sharded_data_parallel": "fsdp1",
    "torch._subclasses.fake_tensor": "fake",
    "torch.profiler.profiler": "profiler",
    "torch": "tensors",
    "labs.training.presets": "presets",
    "labs.fsdp.node_jobs": "presets",
    "labs.training.fine_tuning": "presets",
    **dict.fromkeys(quick.MODULES, "quick"),
}


class _Finder:
    """Finds a module of PATCHES as all others would, and patches it when its code has run."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name not in PATCHES:
            return None
        spec = spec_by_others(_Finder, name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module):
                run(module)
                import_module(f"pretend_gpus.{PATCHES[name]}").patch(module)

            spec.loader.exec_module = exec_module
        return spec


def install():
    """Patches each module of PATCHES when it is imported."""
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)
