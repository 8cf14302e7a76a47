"""The allocator's events of two training steps of any job on a real rank, by the profiler."""

from time import sleep

from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile, record_function

from labs import launch
from labs.meters.waits import WaitObserver
from labs.predictions.dryrun import jobs

AGREE = 1e-5  # two runs found the same: a first one may be higher by 8e-5, of DDP
PAUSE, LONG_PAUSE = 5e-4, 0.02  # seconds in which gloo's thread drops its references
_COPIES = ("c10d::_allgather", "c10d::_reduce_scatter", "gloo:all_gather", "gloo:reduce_scatter")
_SECOND = "second step"


def on_ranks(job: jobs.DryRunJob, most: int = 3) -> int:
    """Bytes at the highest moment of the second step, the batch included: the minimum of all ranks
    and runs, since a free that a gloo thread did not report makes a number too high and nothing
    makes one too low. Runs are repeated until the minimum was seen in two; all but the first leave
    gloo's thread more time, which it needs on a busy machine. On the CPU on every machine, because
    the dry runs that it judges are of the CPU's operators."""
    leasts = []
    while len(leasts) < (most if job.ranks > 1 else 1) and not _agreed(leasts):
        pause = LONG_PAUSE if leasts else PAUSE
        found = launch(rank_peak, job, pause, ranks=job.ranks, device="cpu", verify=False,
                       quiet=True)
        leasts.append(found[0])  # where shards are uneven, rank 0 has the most
    return min(leasts)


def _agreed(leasts) -> bool:
    first, second = (*sorted(leasts), 0, 0)[:2]
    return len(leasts) > 1 and second <= first * (1 + AGREE)


def rank_peak(job: jobs.DryRunJob, pause: float) -> int:
    """On a rank: bytes at the highest moment of the second of two steps. pause: seconds after each
    wait, and after the first step: in the second DDP makes new buckets in place of the old ones."""
    mesh = init_device_mesh("cpu", (job.ranks,)) if job.strategy == "fsdp2" else None
    with (_DelayedWaits(pause),
          profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded):
        module, optimizer = jobs.wrap(job, jobs.build(job), mesh)
        data = jobs.batch(job, None)
        jobs.step(job, module, optimizer, data)
        sleep(pause)  # DDP itself waits in C++, where no observer looks
        with record_function(_SECOND):
            jobs.step(job, module, optimizer, data)
    return _peak(recorded.profiler.kineto_results)


class _DelayedWaits(WaitObserver):
    """Sleeps so many seconds after each wait, in which gloo's thread drops its references."""

    def __init__(self, pause: float):
        self._pause = pause

    def wait_ended(self, waited):
        sleep(self._pause)


def _peak(results) -> int:
    """gloo's copies are taken as freed at once: its threads free them where no profiler looks."""
    begin, end = next((e.start_ns(), e.end_ns()) for e in results.events() if e.name() == _SECOND)
    held, live, most = 0, {}, 0
    for at, pointer, size, copied in sorted(_walk(results.experimental_event_tree())):
        held += size if size > 0 else -live.pop(pointer, 0)
        if size > 0:
            held -= live.pop(pointer, 0)  # an address given out again was freed
            live[pointer] = size
        most = max(most, held) if begin <= at <= end else most
        if size > 0 and copied:
            held -= live.pop(pointer)
    return most


def _walk(events, copied=False):
    """(nanoseconds, address, bytes, whether gloo copied it) of every allocation."""
    todo = [(event, copied) for event in events]
    while todo:
        event, copied = todo.pop()
        if event.tag.name == "Allocation":
            yield event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size, copied
        else:
            copies = copied or event.name.startswith(_COPIES)
            todo += [(child, copies) for child in event.children]
