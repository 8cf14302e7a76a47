"""How long it takes to start N ranks, all-reduce once and have the results back."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist

from _bench.progress import done, say
from labs import launch

RANKS = (1, 2, 4, 8, 16, 32)
ROUNDS = {1: 5, 2: 5, 4: 3, 8: 3, 16: 2, 32: 1}


def one_all_reduce() -> float:
    """What every variant does on each rank."""
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


def _spawned(rank, ranks, directory):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank,
                            world_size=ranks)
    with open(f"{directory}/{rank}", "w") as file:
        file.write(str(one_all_reduce()))
    dist.destroy_process_group()


def _with_spawn(ranks) -> list:
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(_spawned, (ranks, directory), nprocs=ranks)
        results = []
        for rank in range(ranks):
            with open(f"{directory}/{rank}") as file:
                results.append(float(file.read()))
    return results


def _with_labs(ranks) -> list:
    return launch(one_all_reduce, ranks=ranks, quiet=True)


_NOTEBOOK_LAUNCHER = """
import json, sys, time, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed as dist
from accelerate import notebook_launcher
def work():
    total = torch.ones(1)
    if dist.is_initialized():
        dist.all_reduce(total)
    else:
        from accelerate import PartialState
        PartialState(cpu=True)
        dist.all_reduce(total)
seconds = []
for _ in range(int(sys.argv[2])):
    began = time.perf_counter()
    notebook_launcher(work, num_processes=int(sys.argv[1]))
    seconds.append(time.perf_counter() - began)
print("RESULT", json.dumps(seconds))
"""


def _notebook_launcher(ranks, rounds):
    """Median seconds of accelerate's notebook_launcher (it forks, and returns no results), or
    None where it fails; in a process of its own, because it leaves handlers behind."""
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "lo",
                   "OMP_NUM_THREADS": "1"}
    try:
        ran = subprocess.run([sys.executable, "-P", "-c", _NOTEBOOK_LAUNCHER, str(ranks),
                              str(rounds)], capture_output=True, text=True, timeout=120,
                             env=environment)
    except subprocess.TimeoutExpired:
        return None
    lines = [line for line in ran.stdout.splitlines() if line.startswith("RESULT")]
    return statistics.median(json.loads(lines[-1].removeprefix("RESULT"))) if lines else None


def run(arguments) -> dict:
    """Medians in seconds, by ranks; ours and spawn take turns."""
    ours, spawn, accelerate = {}, {}, {}
    launch(one_all_reduce, ranks=1, quiet=True)  # the fork server imports torch once
    for ranks in arguments.ranks or RANKS:
        rounds = arguments.rounds or ROUNDS.get(ranks, 1)
        seconds = {_with_labs: [], _with_spawn: []}
        for round_ in range(rounds):
            say(f"{ranks} ranks, round {round_ + 1} of {rounds}")
            for variant, times in seconds.items():
                began = time.perf_counter()
                assert variant(ranks) == [float(ranks)] * ranks
                times.append(time.perf_counter() - began)
        ours[ranks], spawn[ranks] = (statistics.median(times) for times in seconds.values())
        say(f"{ranks} ranks, accelerate's notebook_launcher")
        accelerate[ranks] = _notebook_launcher(ranks, rounds)
    done()
    return {"launch_s": ours, "mp_spawn_s": spawn, "notebook_launcher_s": accelerate,
            "ratio_to_mp_spawn": {ranks: spawn[ranks] / ours[ranks] for ranks in ours}}


def table(result) -> str:
    """The result for a terminal."""
    lines = ["start N ranks, one all-reduce, results back; median seconds",
             f"{'ranks':>6} {'labs.launch':>12} {'mp.spawn':>10} {'spawn / ours':>13} "
             f"{'notebook_launcher':>18}"]
    for ranks, ours in result["launch_s"].items():
        other = result["notebook_launcher_s"][ranks]
        lines.append(f"{ranks:>6} {ours:>12.3f} {result['mp_spawn_s'][ranks]:>10.2f} "
                     f"{result['ratio_to_mp_spawn'][ranks]:>12.1f}x "
                     f"{'failed' if other is None else f'{other:.3f}':>18}")
    lines.append("notebook_launcher forks the caller and gives no results back")
    return "\n".join(lines)
