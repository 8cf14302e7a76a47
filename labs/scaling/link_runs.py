"""The runs between two hosts that the notebook makes, each with one start of torchrun."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from labs.predictions.communication.host_links import Topology
from labs.scaling import link_collectives, link_strategies
from labs.scaling.on_hosts import TIMEOUT, run_on_hosts
from labs.workers.hosts import hosts

TOPOLOGY = Topology(hosts=2, ranks=2)
JOB_LINK = {"bandwidth": "200mbit"}  # of the student's own job
BANDWIDTHS = ("50mbit", "100mbit")  # slow enough that hierarchical wins on a CPU, too


def all_reduces() -> dict:
    """See `collectives.measure_all_reduces`."""
    return run_on_hosts(link_collectives.measure_all_reduces, topology=TOPOLOGY)[0]


def hierarchical(hierarchical_all_reduce: Callable) -> dict:
    """See `collectives.measure_hierarchical`."""
    return run_on_hosts(link_collectives.measure_hierarchical, hierarchical_all_reduce,
                        TOPOLOGY.hosts, BANDWIDTHS, topology=TOPOLOGY)[0]


def training_steps(hybrid_shard: Callable) -> dict:
    """See `strategies.measure_strategies`."""
    return run_on_hosts(link_strategies.measure_strategies, hybrid_shard, TOPOLOGY.hosts,
                        topology=TOPOLOGY)[0]


def job(script: str | Path, *arguments: str, quiet: bool = False,
        folder: str | Path = ".") -> dict:
    """A script under torchrun on two hosts with two ranks each: the fields of `recorded.JobRun`.
    folder: where it runs."""
    words = ["torchrun", "--nproc-per-node", str(TOPOLOGY.ranks), str(script), *arguments]
    with hosts(TOPOLOGY.hosts, **JOB_LINK) as pair:
        # All hosts would share this machine's GPUs, which NCCL refuses.
        done = pair.run(words, quiet=quiet, folder=str(folder), timeout=TIMEOUT,
                        environment={"CUDA_VISIBLE_DEVICES": ""})
    shown = ["torchrun", "--nnodes", str(TOPOLOGY.hosts), *words[1:3], Path(script).name]
    return {"command": " ".join([*shown, *arguments]), "seconds": done.seconds,
            "output": [_own_lines(done.output[host]) for host in sorted(done.output)],
            "exit_codes": [done.exit_codes[host] for host in sorted(done.exit_codes)],
            "sent": [link.sent for link in done.bytes]}


def _own_lines(output) -> str:
    """What the ranks printed, without torchrun's and the libraries' own lines."""
    lines = (line.split("\r")[-1] for line in output.splitlines())
    return "\n".join(line for line in lines if re.match(r"rank \d+ │ ", line)
                     and "Warning" not in line)


def all_runs(answers: SimpleNamespace, script: str | Path) -> dict[str, dict]:
    """Every run by name, with the answers of a notebook: what `recorded` writes."""
    return {"job": job(script, "--epochs", "1", quiet=True, folder=Path(script).parent),
            "all-reduces": all_reduces(),
            "hierarchical": hierarchical(answers.hierarchical_all_reduce),
            "training steps": training_steps(answers.hybrid_shard)}
