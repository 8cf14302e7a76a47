"""Cuts short what the labs repeat so that its median means something.

Student notebooks are run untouched besides their solutions, in a browser or by nbclient, to see
what the page shows and that every exercise waits. The pretend node shows what runs on a GPU.
Neither needs the median: the solutions, run whole by nbval, show that.
"""

import functools
import inspect
import os
import sys

from import_hooks import spec_by_others

# module -> its constants
CONSTANTS = {
    "labs.zero_stages.lifecycle_recording": {"STEPS": 2},
    "labs.meters.typical_step": {"MAX_DEVIATION": float("inf")},  # of one step from another one
    "labs.faults.slow_rank": {"EXTRA_COMPUTING": 6, "LOADING": 1},
    "labs.fsdp_profiling.recorded_runs": {"LAPTOP_BATCH": 2, "WARM_UP": 1, "RECORDINGS": 1,
                                          "FEW_RECORDINGS": 1, "ROUNDS": 1, "FEW_ROUNDS": 1},
    "labs.scaling.lost_time_runs": {"WARM_UP": 1, "RECORDINGS": 1, "ROUNDS": 1, "EXTRA": 2}}
# module -> function -> the most that each of these arguments may be
MOST = {
    "labs.meters.throughput": {"seconds_per_step": {"rounds": 1, "warmup": 1, "repeat": 1}},
    "labs.meters.typical_step": {"record_in_turns": {"rounds": 1}},
    "labs.checks.comparison": {"compare": {"tries": 1}},
    "labs.fsdp.memory_limits": {"measure_overhead": {"layers": (2, 6)}},
    "labs.manual_ddp.variants": {"losses": {"steps": 3}},
    "labs.fsdp_profiling.set_prefetch": {"show_ahead": {"ahead": (0, 1)}}}
MODULES = {*CONSTANTS, *MOST}


def patch(module) -> None:
    """Patches one of MODULES, which has just been imported."""
    name = module.__name__
    for constant, value in CONSTANTS.get(name, {}).items():
        assert hasattr(module, constant), f"{name} has no {constant}"
        setattr(module, constant, value)
    for function, most in MOST.get(name, {}).items():
        setattr(module, function, _capped(getattr(module, function), most))


def _capped(function, most):
    signature = inspect.signature(function)

    @functools.wraps(function)
    def called(*args, **kwargs):
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        for name, value in most.items():
            given.arguments[name] = min(value, given.arguments[name])
        return function(*given.args, **given.kwargs)

    return called


class _Finder:
    """Finds a module of MODULES as all others would, and patches it when its code has run."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name not in MODULES:
            return None
        spec = spec_by_others(_Finder, name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module):
                run(module)
                patch(module)

            spec.loader.exec_module = exec_module
        return spec


def runs_a_student_notebook() -> bool:
    """Whether this is the kernel of one, or what it has started: Jupyter starts a kernel in its
    notebook's folder."""
    try:
        return os.path.basename(os.getcwd()) == "notebooks"
    except FileNotFoundError:
        return False


def install() -> None:
    """Patches each of MODULES when it is imported."""
    sys.meta_path.insert(0, _Finder)
