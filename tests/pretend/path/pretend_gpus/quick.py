"""PRETEND_QUICK=1: what a solution does that takes time and shows nothing of a GPU is cut short.

Checks pass without being run, because other tests run them; what is repeated so that its median
means something is done once or twice. Some of what is the same with any number of GPUs is done only
with two: with eight, each rank takes its time on the same cores.
"""

import functools
import inspect
import os
import tempfile
from pathlib import Path

from pretend_gpus import machine

# module -> its constants
CONSTANTS = {
    "labs.meters.throughput": {"WARMUP_ON_GPU": 1},
    "labs.manual_ddp.variants": {"RECORDED": 1},
    "labs.zero_stages.charts.recording": {"STEPS": 2},
    "labs.fsdp.node.running": {"FEWEST": 1, "MOST": 1},
    "labs.fsdp_profiling.injected_faults": {"EXTRA_COMPUTING": 6, "LOADING": 1},
    "labs.fsdp_profiling.recording": {"WARM_UP": 1, "RECORDINGS": 1, "FEW_RECORDINGS": 1,
                                      "ROUNDS": 1, "FEW_ROUNDS": 1,
                                      # not the checkout's, in which other tests record meanwhile
                                      "FOLDER": Path(tempfile.gettempdir(), "experiments", "05")}}
# module -> function -> the most that each of these arguments may be
MOST = {
    "labs.meters.throughput": {"seconds_per_step": {"rounds": 1, "warmup": 1, "repeat": 1}},
    "labs.exercises.comparison": {"compare": {"tries": 1}},
    "labs.fsdp.memory_limits": {"measure_overhead": {"layers": (2, 6)}},
    "labs.manual_ddp.variants": {"losses": {"steps": 3}},
    "labs.fsdp_profiling.charts": {"show_ahead": {"ahead": (0, 1)}}}
# But with two GPUs. module -> functions that are left out: they use no rank of the pretend node, or
# show what has nothing to do with the number of GPUs
LEFT_OUT = {"labs.memory_math.explorer": ["show_scaling"],
            "labs.start_here.charts": ["run_script"],
            "labs.fsdp.charts.sharding": ["compare_with_zero3", "compare_accumulation",
                                          "compare_meshes"],
            "labs.fsdp.fsdp1": ["fsdp1_wrap_policies"]}
KEPT_FAULTS = {"item", "slow rank"}  # of 05


def patch(module):
    if not os.environ.get("PRETEND_QUICK"):
        return
    name = module.__name__
    if name == "labs.exercises.verdicts":
        module.check = functools.partial(_passed_check, module)
    for constant, value in CONSTANTS.get(name, {}).items():
        assert hasattr(module, constant), f"{name} has no {constant}"
        setattr(module, constant, value)
    for function, most in MOST.get(name, {}).items():
        setattr(module, function, _capped(getattr(module, function), most))
    if machine.count() != 2:
        _leave_out(name, module)


def _leave_out(name, module):
    for function in LEFT_OUT.get(name, ()):
        assert hasattr(module, function), f"{name} has no {function}"
        setattr(module, function, lambda *_, **__: "(left out)")
    if name == "labs.fsdp.memory_limits":
        module.measure_overhead = lambda *_, **__: module.ProcessOverhead(0.0, 0.0)
        if machine.count() > 2:
            module.fits = _once(module.fits)
    if name == "labs.fsdp.node.jobs":
        module.scaling_jobs = _some(module.scaling_jobs, 0, -1)
        if machine.count() > 2:
            module.jobs_for = _some(module.jobs_for, 0, 4, -1)  # DDP, larger, offloaded
    if name == "labs.training.strategies.third_party":
        module.has_deepspeed = lambda: False
    if name == "labs.fsdp_profiling.scaffold":
        for cause in set(list(module.CAUSES)[1:]) - KEPT_FAULTS:
            del module.CAUSES[cause]


def _some(jobs, *kept):
    def called(*args):
        found = jobs(*args)
        return [found[number] for number in kept]

    return called


def _once(fits):
    """The first training of a strategy is run; whether a larger model fits follows from it."""
    largest = {}

    def called(strategy, layers, limit):
        if strategy not in largest:
            largest[strategy] = layers if fits(strategy, layers, limit) else layers - 1
        return layers <= largest[strategy]

    return called


def _passed_check(verdicts, exercise, hints=None, device="cpu"):
    """labs.exercises.verdicts.check: the check returns that it has passed."""
    def decorate(function):
        def check(*answers, **options):
            verdict = verdicts.Verdict(exercise, True, "is not checked here")
            return verdicts.print_in_script(verdict)
        return functools.wraps(function)(check)
    return decorate


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


MODULES = {"labs.exercises.verdicts", "labs.training.strategies.third_party",
           "labs.fsdp_profiling.scaffold", "labs.fsdp.node.jobs", *LEFT_OUT, *CONSTANTS, *MOST}
