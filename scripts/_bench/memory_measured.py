"""What a training step really holds on a real rank: the yardstick of the memory bench."""

import contextlib
from dataclasses import replace

from torch.distributed.device_mesh import init_device_mesh

from labs import launch
from labs.meters import memory
from labs.predictions.dryrun import ddp, fake, jobs
from labs.workers import cuda, processes

MOST_RUNS = 5
AGREE = 1e-3  # two runs found the same


def on_ranks(case, most=MOST_RUNS) -> dict:
    """"bytes" at the highest moment of the second step on a rank, the batch included, from the
    allocator's own events; "runs" it took and the "spread_pct" of what ranks and runs saw.

    It is the minimum of all ranks and runs: gloo's threads free their copies whenever they come to
    it, some of it unseen by the profiler, so a number may be too high, and never too low. Runs are
    repeated until the minimum was seen in two. Where shards are uneven, rank 0, which has the most,
    counts alone. Of CPU ranks: `on_gpu` measures the same on a GPU.
    """
    job, leasts, seen = case.job, [], []
    while len(leasts) < (most if job.ranks > 1 else 1) and not _agreed(leasts):
        held = launch(_step, job, ranks=job.ranks, device="cpu", verify=False, quiet=True)
        peaks = [peak for shard, peak in held if shard == held[0][0]]
        leasts.append(min(peaks))
        seen += peaks
    least = min(leasts)
    return {"bytes": least, "runs": len(leasts), "spread_pct": 100 * (max(seen) / least - 1)}


def _agreed(leasts) -> bool:
    """Whether two runs found the minimum."""
    first, second = (*sorted(leasts), 0, 0)[:2]
    return len(leasts) > 1 and second <= first * (1 + AGREE)


def _step(job):
    """On a rank: (bytes of its optimizer's state, bytes at the second step's highest moment)."""
    def build():
        mesh = init_device_mesh("cpu", (job.ranks,)) if job.strategy == "fsdp2" else None
        return jobs.wrap(job, jobs.build(job), mesh)

    batches = [jobs.batch(job, None) for _ in range(2)]
    report = memory.record(build, batches)
    # made before the recording begins, so that it does not see them
    nbytes = sum(tensor.nbytes for tensor in batches[-1].values())
    return report.phases["step"].optimizer_state, report.step_peak.total + nbytes


def on_gpu(case) -> dict:
    """The same on one GPU, by its caching allocator: real tensors, and where the job has several
    ranks, a process group whose other ranks are not there."""
    return {"bytes": in_fresh_process(_step_on_gpu, case), "runs": 1, "spread_pct": 0.0}


def _step_on_gpu(case) -> int:
    job = replace(case.job, device="cuda")
    with fake_ranks(job):
        mesh = init_device_mesh("cuda", (job.ranks,)) if job.strategy == "fsdp2" else None
        module, optimizer = jobs.wrap(job, jobs.build(job), mesh)
        ddp.complete_all_reduces(module)
        data = jobs.batch(job, None)
        for _ in range(2):
            cuda.reset_peak()
            jobs.forward(job, module, data).backward()
            optimizer.step()
            optimizer.zero_grad()
        return cuda.memory().peak


def fake_ranks(job):
    """A process group of the job's ranks in which nobody answers; none for plain training."""
    return contextlib.nullcontext() if job.strategy == "plain" else fake.ranks(job.ranks)


def in_fresh_process(function, *args):
    """What function(*args) returns in a process of its own; raises RuntimeError with its words."""
    receiver, sender = processes.context().Pipe(duplex=False)
    process = processes.start(_tell, (sender, function, args))
    sender.close()
    try:
        result, trouble = receiver.recv()
    except EOFError:
        result, trouble = None, "the process ended without a word"
    process.join()
    if trouble:
        raise RuntimeError(trouble)
    return result


def _tell(sender, function, args):
    try:
        sender.send((function(*args), None))
    except Exception as error:
        sender.send((None, f"{type(error).__name__}: {_short(error)}"))


def _short(error, most=90) -> str:
    text = next(iter(str(error).strip().splitlines()), "")
    return text if len(text) <= most else text[:most] + " ..."
