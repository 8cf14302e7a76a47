"""PRETEND_QUICK=1: what a solution does that takes time and shows nothing of a GPU is cut short.

Checks pass without being run, because other tests run them; what is repeated so that its median
means something is done once or twice. What is the same with any number of GPUs is done only with
several.
"""

import functools
import math
import os
import tempfile
from pathlib import Path

import fewer_rounds

from pretend_gpus import machine

# module -> its constants; more of them in `fewer_rounds`
CONSTANTS = {
    "labs.meters.throughput": {"WARMUP_ON_GPU": 1},
    "labs.fsdp.node_run": {"FEWEST": 1, "MOST": 1},
    "labs.fsdp.paced_run": {"WARM_UP": 1, "STEPS": 1},
    # beside other tests a step may be far from the usual one, and its picture would not be drawn
    "labs.meters.typical_step": {"MAX_DEVIATION": math.inf},
    "labs.meters.own_speed": {"WIDTH": {"cpu": 512, "cuda": 512}},
    "labs.scaling.scaling_runs": {"TRIES": 1},
    "labs.surviving_failure.crash_series": {"SHOWN_KILLS": 3},
    "labs.scaling.lost_time_runs": {"WARM_UP": 1, "RECORDINGS": 1, "ROUNDS": 1, "EXTRA": 2},
    # not the checkout's folder, in which other tests record meanwhile
    "labs.fsdp_profiling.recorded_runs": {
        "FOLDER": str(Path(tempfile.gettempdir(), "experiments", "05"))}}
# module -> functions that are left out: dry runs and searches, which have no rank, and run wherever
# notebooks do; and what runs on the CPU everywhere
ALWAYS_LEFT_OUT = {"labs.memory_math.scaling": ["show_scaling"],
                   "labs.sharded_muon.muon_update": ["show_sharded_muon"],
                   "labs.pipeline_parallel.choose_plan": ["show_plans", "show_published_plans"],
                   "labs.surviving_failure.other_ranks": ["show_other_ranks"],
                   "labs.surviving_failure.job_state": ["show_stale_gradient"]}
# With one GPU. module -> functions that are left out: they use no rank of the pretend node, or show
# what has nothing to do with the number of GPUs
LEFT_OUT = {"labs.start_here.script": ["run_script"],
            "labs.fsdp.shard": ["show_beside_zero3"],
            "labs.fsdp.comparisons": ["show_gradient_accumulation", "show_hsdp"],
            "labs.fsdp.fsdp1": ["show_wrap_policies"],
            # on 8 ranks, which share 2 GPUs as they share one
            "labs.tensor_parallel.ring_attention": ["show_ring_memory"],
            "labs.tensor_parallel.context_parallel": ["show_three_ways"],
            "labs.pipeline_parallel.three_dimensions": ["show_three_dimensions"]}
NO_HOSTS = "The pretend node has no hosts."
KEPT_FAULTS = {"item", "slow rank"}  # of 05
KEPT_RUNS = ("slow link", "slow rank")  # of 06; GPUs have a slow link of their own
# (launcher, script) of 06. Each process that they start imports torch by itself: torchrun starts
# train.py, too, and Accelerate finetune.py, for which it chooses the device
NOT_STARTED = {("torchrun", "who.py"), ("accelerate", "train.py")}


def patch(module):
    if not os.environ.get("PRETEND_QUICK"):
        return
    name = module.__name__
    if name == "labs.checks.verdicts":
        module.check = functools.partial(_passed_check, module)
    for constant, value in CONSTANTS.get(name, {}).items():
        setattr(module, constant, value)
    fewer_rounds.patch(module)
    if name == "labs.workers.hosts.network":  # they compute on the CPU wherever they are
        module.hosts_unavailable = lambda: NO_HOSTS
    if name == "labs.surviving_failure.lost_host":
        module.hosts = _no_hosts(module)
    if name == "labs.sharding_in_jax.jax_process":  # JAX computes on the CPU, too
        module.has_jax = lambda: False
    if name == "labs.scaling.lost_time_runs":
        module.record_lost_time = functools.partial(module.record_lost_time, names=KEPT_RUNS)
    if name == "labs.checks.scripts.commands":
        module.run_command = _some_commands(module)
    _leave_out(ALWAYS_LEFT_OUT.get(name, ()), module)
    if machine.count() < 2:
        _cut_short(name, module)


def _some_commands(commands):
    run_command = commands.run_command

    def called(command, *args, **kwargs):
        words = tuple(map(str, command))
        if any(words[0] == launcher and script in words for launcher, script in NOT_STARTED):
            return commands.CommandResult(words, 0, 0.0, "(left out)")
        return run_command(command, *args, **kwargs)

    return called


def _no_hosts(module):
    def hosts(_number):
        raise module.HostsUnavailable(NO_HOSTS)

    return hosts


def _leave_out(functions, module):
    for function in functions:
        assert hasattr(module, function), f"{module.__name__} has no {function}"
        setattr(module, function, lambda *_, **__: "(left out)")


def _cut_short(name, module):
    _leave_out(LEFT_OUT.get(name, ()), module)
    if name == "labs.fsdp.memory_limits":
        module.measure_overhead = lambda *_, **__: module.ProcessOverhead(0.0, 0.0)
    if name == "labs.fsdp.node_jobs":
        module.scaling_jobs = _some(module.scaling_jobs, 0, -1)
    if name == "labs.fsdp.paced_run":  # ranks of the CPU; "billion", cut, sends 50 times more
        module.slow_down = functools.partial(module.slow_down, block=0.002)
        module.laptop_jobs = _some(module.laptop_jobs, 1, 2, 4)
        module.scaled_jobs = _some(module.scaled_jobs, 0)
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


def _passed_check(verdicts, exercise, hints=None, device="cpu"):
    """labs.checks.verdicts.check: the check returns that it has passed."""
    def decorate(function):
        def check(*answers, **options):
            verdict = verdicts.Verdict(exercise, True, "is not checked here")
            return verdicts.print_in_script(verdict)
        return functools.wraps(function)(check)
    return decorate


MODULES = {"labs.checks.verdicts", "labs.training.strategies.third_party",
           "labs.fsdp_profiling.scaffold", "labs.fsdp.node_jobs",
           "labs.workers.hosts.network", "labs.sharding_in_jax.jax_process",
           "labs.checks.scripts.commands",
           "labs.surviving_failure.lost_host", *ALWAYS_LEFT_OUT,
           *LEFT_OUT, *CONSTANTS, *fewer_rounds.MODULES}
