"""Exercise 8.5: a checkpoint that is written while training continues, and the host's memory that
it takes in flight and after it."""

import copy
import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from labs.checks.on_ranks import on_ranks, raise_on_all_ranks
from labs.checks.verdicts import Wrong, check, kind_of
from labs.faults.slow_disk import HeldDisk, late_threads, resident_bytes
from labs.workers import processes

OPENS_AFTER = 0.3  # seconds
_SNAPSHOT_HINT = ("Training continues as soon as save returns: all that belongs to the state is "
                  "copied before, by the thread that trains. lab.to_bytes(state) is a copy.")


class DiskFailed(Exception):
    """What a broken disk raises; no OSError, because not every error is one."""


@check("8.5")
def check_async_saver(saver_class: Callable):
    """saver_class(write) has save(path, state) and close(); write(path, data) may be slow."""
    with processes.temporary_folder() as folder:
        [measured] = on_ranks(_on_one_rank, saver_class, Path(folder), world_sizes=(1,),
                              timeout=45.0)
        on_ranks(_on_two_ranks, saver_class, Path(folder), world_sizes=(2,))
    return ("save returns while a blocked disk has not written anything, and the file has the "
            "values of the call; no two writes overlap, no error is lost, close waits; host "
            f"memory: one snapshot, {SIZE / 1e6:.0f} MB predicted, {measured / 1e6:.0f} MB "
            "measured")


def _on_one_rank(saver_class, folder) -> int:
    """The measured bytes of a snapshot."""
    _judge_snapshot(saver_class, folder)
    _judge_second_save(saver_class, folder)
    _judge_close(saver_class, folder)
    _judge_errors(saver_class, folder)
    return judge_memory(saver_class, folder)


def _job() -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """A model, its optimizer, and a function that trains one step."""
    torch.manual_seed(8)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    inputs = torch.randn(4, 16)

    def step():
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return model, optimizer, step


def _state(model, optimizer, number) -> dict[str, Any]:
    # A list inside a dictionary: a shallow copy of the state still shares it with the job.
    return {"step": number, "model": model.state_dict(), "optimizer": optimizer.state_dict(),
            "data": {"at": [number]}}


def _judge_snapshot(saver_class, folder):
    """The job trains on while the thread has not even begun."""
    disk, path = HeldDisk(), folder / "snapshot.pt"
    model, optimizer, step = _job()
    state = _state(model, optimizer, 1)
    want = copy.deepcopy(state)
    # Invariant: the file has the values of the moment at which save was called. A saver that makes
    # its copy in the thread passes where the thread is quick, so here it begins after three more
    # steps.
    with late_threads() as go:
        saver = saver_class(disk)
        saver.save(path, state)
        _judge_not_waited(disk)
        for _ in range(3):
            step()
        state["step"], state["data"]["at"][0] = 4, 4
        go.set()
        if not disk.wait_until_started():
            raise Wrong("save has returned, and 5 seconds later write has not been called",
                        "A thread calls self.write(path, data).", code="nothing_saved")
    _close(saver, disk)
    _judge_file(path, want, disk, "1")


def _close(saver, disk):
    with disk.opening_after(OPENS_AFTER):
        saver.close()
        is_done = bool(disk.done)
    # Invariant: when close returns, the last save is on the disk. A job ends after close, and a
    # daemon thread ends with it.
    if not is_done:
        raise Wrong("close returned while the last save was still being written: when the job then "
                    "ends, that save is lost", "close waits for the save in flight.",
                    code="close_does_not_wait")


def _judge_not_waited(disk):
    # a job that waits for the disk inside save stalls as long as without a thread
    if disk.in_caller:
        raise Wrong("save calls write itself: the job stands still until the disk is done",
                    "Another thread calls it.", code="blocks_on_disk")
    if disk.done:
        raise Wrong("save returns only when the disk is done: the job stands still as long as "
                    "without a thread", "save waits for the save before, not for its own.",
                    code="blocks_on_disk")


def _judge_file(path, want, disk, number):
    """The file has the state as it was when save was called."""
    # Invariant: no save is dropped, and each file is a state that torch.load reads.
    if disk.not_bytes:
        raise Wrong(f"write got {disk.not_bytes}, not bytes", "lab.to_bytes(state)",
                    code="wrong_type")
    if not path.exists():
        raise Wrong(f"save {number} has returned, and after close there is no file {path.name}",
                    "Nothing is dropped: a newer save waits until the one in flight is done.",
                    code="save_lost")
    try:
        found = torch.load(io.BytesIO(path.read_bytes()))
    except Exception as error:
        raise Wrong(f"the file of save {number} cannot be loaded by torch.load: "
                    f"{str(error).splitlines()[0][:100]}", "lab.to_bytes(state)",
                    code="unreadable_file") from None
    # Catches a copy that is made too late, and one that misses a part of the state.
    if difference := _difference(found, want):
        raise Wrong(f"the file of save {number} has other values than the state had when save was "
                    f"called: {difference}", _SNAPSHOT_HINT, code="not_a_snapshot")


def _difference(found, want, name="state") -> str:
    """What is the first leaf that differs; nothing where none does."""
    if isinstance(want, torch.Tensor):
        is_same = isinstance(found, torch.Tensor) and torch.equal(found, want)
        return "" if is_same else f"{name} changed afterwards, and the file with it"
    if isinstance(want, dict | list):
        if not isinstance(found, dict if isinstance(want, dict) else list):
            return f"{name} is {kind_of(found)}"
        if len(found) != len(want):
            return f"{name} has {len(found)} entries, and had {len(want)}"
        keys = want if isinstance(want, dict) else range(len(want))
        return next(filter(None, (_difference(found[key], want[key], f"{name}[{key!r}]")
                                  if isinstance(want, list) or key in found
                                  else f"{name}[{key!r}] is missing" for key in keys)), "")
    return "" if found == want else f"{name} is {found!r}, and was {want!r}"


def _judge_second_save(saver_class, folder):
    disk = HeldDisk()
    model, optimizer, step = _job()
    saver, wanted, waited = saver_class(disk), [], True
    paths = [folder / "second_1.pt", folder / "second_2.pt", folder / "second_3.pt"]
    with disk.opening_after(OPENS_AFTER):
        for number, path in enumerate(paths, 1):
            state = _state(model, optimizer, number)
            wanted.append(copy.deepcopy(state))
            saver.save(path, state)
            waited = waited and (number == 1 or bool(disk.done))
            step()
    saver.close()
    for number, (path, want) in enumerate(zip(paths, wanted, strict=True), 1):
        _judge_file(path, want, disk, str(number))
    # Invariant: one write at a time. Two at once share the bandwidth of the disk, and an older
    # state may end last.
    if disk.at_once > 1:
        raise Wrong(f"{disk.at_once} writes were in flight at once",
                    "First wait for the save before, then begin the next.",
                    code="several_in_flight")
    # with a queue of snapshots, a slow disk fills the host's memory
    if not waited:
        raise Wrong("save 2 returned while save 1 was still being written: two snapshots are in "
                    "the host's memory", "First wait for the save before.",
                    code="several_in_flight")


def _judge_close(saver_class, folder):
    saver_class(HeldDisk()).close()  # a job that never saved
    # Invariant: close waits. Judged at the first save: a saver may wait only for the save before.
    disk, path = HeldDisk(), folder / "close.pt"
    state = {"weight": torch.ones(1000)}
    saver = saver_class(disk)
    saver.save(path, state)
    _close(saver, disk)
    _judge_file(path, state, disk, "1")
    saver.close()


def _judge_errors(saver_class, folder):
    # Invariant: what the disk raises reaches the training loop, at close or at the next save. An
    # exception in a thread ends only that thread, and the job would train on without checkpoints.
    for error in (OSError(28, "No space left on device"), DiskFailed("the disk is gone")):
        name = type(error).__name__
        disk = HeldDisk(error)
        saver = saver_class(disk)
        saver.save(folder / "error.pt", {"weight": torch.ones(10)})
        disk.open()
        if not _raises(saver.close, error):
            raise Wrong(f"write raised {name} in the thread, and close returned as if all were "
                        "well", "A future's result() raises what was raised in the thread.",
                        code="error_lost")
    disk = HeldDisk(OSError(28, "No space left on device"))
    saver, state = saver_class(disk), {"weight": torch.ones(10)}
    saver.save(folder / "error.pt", state)
    disk.open()
    disk.wait_until_done()
    if not _raises(lambda: saver.save(folder / "next.pt", state), disk.error):
        raise Wrong("write raised OSError in the thread, and the next save returned as if all were "
                    "well", "The training loop must know soon that nothing was saved.",
                    code="error_lost")
    # Invariant: an error is raised once. A saver that keeps the failed future raises it for ever.
    disk.error = None
    try:
        saver.save(folder / "again.pt", state)
        saver.close()
    except OSError as error:
        raise Wrong("an error is raised again and again, although the disk has room by now: after "
                    "one failed save none can follow", "Raise it once, then forget it.",
                    code="error_repeated") from error
    _judge_file(folder / "again.pt", state, disk, "again")


def _raises(call, error) -> bool:
    """Whether call() raises the error, or another one because of it."""
    try:
        call()
    except Wrong:
        raise
    except Exception as raised:
        # The student may raise another error `from` this one.
        while raised is not None and raised is not error:
            raised = raised.__cause__ or raised.__context__
        if raised is None:
            raise
        return True
    return False


def _on_two_ranks(saver_class, folder):
    """Each rank saves its own shards; the disk of rank 1 is held, and both train on."""
    from torch.distributed.fsdp import fully_shard

    rank, disk = dist.get_rank(), HeldDisk()
    model, optimizer, step = _sharded_job(fully_shard)
    path = folder / f"sharded_{rank}.pt"
    state = {"model": {name: parameter.detach().to_local()
                       for name, parameter in model.named_parameters()}}
    want = copy.deepcopy(state)
    # Invariant: nothing of a step waits for the disk. FSDP2's steps have collectives, so if rank 1
    # waited for its disk, rank 0 would wait too.
    if rank == 0:
        disk.open()
    saver = saver_class(disk)
    saver.save(path, state)
    for _ in range(3):
        step()
    in_time = rank == 0 or not disk.done
    disk.open()
    saver.close()
    raise_on_all_ranks(_judge_rank, path, want, disk, in_time)


def _sharded_job(fully_shard):
    torch.manual_seed(8)
    model = nn.Sequential(nn.Linear(16, 33), nn.Tanh(), nn.Linear(33, 16))
    fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh(
        "cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step():
        model(torch.ones(4, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return model, optimizer, step


def _judge_rank(path, want, disk, in_time):
    rank = dist.get_rank()
    if not in_time:
        raise Wrong(f"rank {rank}: 3 steps of the job ended only when its disk was done",
                    "Nothing of the job waits for the disk.", code="blocks_on_disk")
    try:
        _judge_file(path, want, disk, "1")
    except Wrong as error:
        raise Wrong(f"rank {rank}: {error.sentence}", error.hint, code=error.code) from None


SIZE = 64_000_000  # bytes of the state
MAX_SNAPSHOTS, MAX_KEPT = 1.5, 0.3  # snapshots: while one is written, and after that
WATCHED, SETTLED = 0.6, 1.0  # seconds


def judge_memory(saver_class: Callable, folder: Path) -> int:
    """Returns the bytes of a snapshot, measured while the disk is held. Raises Wrong where more
    than one is held, or one after close."""
    held = []
    disk, state = HeldDisk(), {"weight": torch.ones(SIZE // 4)}
    before = resident_bytes()

    # held: bytes above `before` while a save is in flight, while a second one waits, and after
    # close.
    def measure():
        held.append(resident_bytes() - before)

    def watch():
        """While the second save waits: what a busy machine copies late counts too."""
        measure()
        until = time.monotonic() + WATCHED
        while held[-1] <= MAX_SNAPSHOTS * SIZE and time.monotonic() < until:
            time.sleep(0.02)
            held[-1] = max(held[-1], resident_bytes() - before)

    saver = saver_class(disk)
    saver.save(folder / "large.pt", state)
    disk.wait_until_started()
    measure()
    # save blocks here, so another thread measures. A saver that copies before it waits has two
    # snapshots then.
    with disk.opening_after(0.0, watch):
        saver.save(folder / "large.pt", state)
    saver.close()
    measure()
    until = time.monotonic() + SETTLED
    while held[-1] > MAX_KEPT * SIZE and time.monotonic() < until:
        time.sleep(0.02)  # a pool's thread frees the bytes shortly after the result
        held[-1] = resident_bytes() - before
    for bytes_held, when in zip(held, ("a save is in flight", "a second save waits for the first"),
                                strict=False):
        if bytes_held > MAX_SNAPSHOTS * SIZE:
            raise Wrong(f"while {when}, {bytes_held / 1e6:.0f} MB are allocated for a state of "
                        f"{SIZE / 1e6:.0f} MB", "lab.to_bytes(state) is the one copy that is "
                        "needed; it is made when the save before is done.", code="memory_kept")
    if held[-1] > MAX_KEPT * SIZE:
        raise Wrong(f"after close {held[-1] / 1e6:.0f} MB are still allocated for a state of "
                    f"{SIZE / 1e6:.0f} MB", "Forget the snapshot when it is written.",
                    code="memory_kept")
    return held[0]
