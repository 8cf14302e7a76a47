"""Measures between two hosts, for the pictures of notebook 06, and runs a job on them."""

from collections.abc import Callable
from pathlib import Path

from labs.checks.scripts.files import missing_script, raise_if_waiting, waiting_exercise
from labs.checks.verdicts import Wrong, shows
from labs.predictions.communication import host_links
from labs.predictions.communication.host_links import LinkTime
from labs.scaling import link_collectives, link_runs
from labs.scaling.link_recordings import JobRun, LinkRun, link_run, measured_or_recorded

_last: list[LinkRun] = []


@shows("A job on two hosts")
def show_two_hosts(script: str, *arguments: str) -> JobRun:
    """Starts a script by torchrun, with a c10d rendezvous, on two hosts with two ranks each, whose
    links carry 200 Mbit/s, and shows what each host prints."""
    if missing := missing_script(script):
        raise Wrong(missing, code="file_missing")
    if number := waiting_exercise(script):
        raise NotImplementedError(f"Exercise {number}")
    found = measured_or_recorded("job", lambda: link_runs.job(Path(script).resolve(), *arguments))
    return JobRun(**found)


def measure_all_reduces() -> LinkRun:
    """Times all-reduces of several sizes on links of 25, 50 and 100 Mbit/s, and counts the bytes
    that collectives send over the link of a host."""
    _last[:] = [link_run(measured_or_recorded("all-reduces", link_runs.all_reduces))]
    return _last[0]


def last_all_reduces() -> LinkRun:
    """What `measure_all_reduces` returned last: two pictures show it. Measures where it has not
    been called."""
    return _last[0] if _last else measure_all_reduces()


def fit_all_reduces(run: LinkRun) -> LinkTime:
    """α and β of the flat all-reduce, fitted to the sizes of FITTED on the 50 Mbit/s link; `.alpha`
    in seconds, `.beta` in bytes per second."""
    sizes = [size for _, size in link_collectives.FITTED]
    return host_links.fit(
        [host_links.flat_all_reduce(size, run.topology) for size in sizes],
        [run.seconds("all-reduce", *one) for one in link_collectives.FITTED])


def measure_hierarchical(hierarchical_all_reduce: Callable) -> LinkRun:
    """Times the student's all-reduce and torch's, in turns, and counts the bytes of both."""
    raise_if_waiting(hierarchical_all_reduce, 2)
    return link_run(measured_or_recorded(
        "hierarchical", lambda: link_runs.hierarchical(hierarchical_all_reduce)))


def measure_training(hybrid_shard: Callable) -> LinkRun:
    """Times training steps of DDP, ZeRO-3, FSDP and HSDP, in turns, and counts their bytes."""
    raise_if_waiting(hybrid_shard, 2)
    return link_run(measured_or_recorded(
        "training steps", lambda: link_runs.training_steps(hybrid_shard)))
