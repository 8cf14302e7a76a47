"""Starts a script on ranks as `torchrun --standalone` does, but forks the ranks from the process
that has imported torch already: a run then takes a second instead of ten.

As with torchrun, each rank is a fresh process with the same variables in its environment; when one
fails, the others get SIGTERM, and the job's exit code is 1. Only torchrun's own process is missing:
this one holds the store in which the ranks meet.
"""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

from labs.checks.scripts.probe import RankRecord, RankStart, main
from labs.workers import devices, flight_recorder, processes, programs, worker
from labs.workers.launch_error import Stopped

SECONDS = 60.0  # that a run may take
GRACE = 5.0  # seconds in which ranks must end after SIGTERM; torchrun gives them 30
# Of the file that a script writes; the names are no script's default.
METRICS, CHECKPOINT = "--metrics", "--checkpoint"
_FILES = {METRICS: "steps-of-this-run.json", CHECKPOINT: "checkpoint-of-this-run.pt"}
_ROOT = str(Path(__file__).resolve().parents[3])
_PRINTED = 100_000  # characters of a rank's output that are kept


@dataclass
class Run:
    """What a run of a script left behind.

    script: its file's name. code: the job's exit code, None where it was stopped. codes: of the
    ranks, None where a rank did not end by itself. records: what each rank did, None where it could
    not say. output: what each rank printed. batches: of each rank, the number that went forward.
    waiting: for each rank, the rest of a sentence: what it waited in and where when the run was
    stopped, else what it had last called; "" where that is unknown. left: processes that were still
    there after the ranks' end.
    option: METRICS or CHECKPOINT, which names the file that the script is to write. metrics: what
    is in the file, JSON or a state dict; None without a readable one.
    """

    script: str
    ranks: int
    arguments: tuple[str, ...]
    code: int | None
    codes: list[int | None]
    seconds: float
    records: list[RankRecord | None]
    output: list[str]
    batches: list[int]
    waiting: list[str]
    left: int
    metrics: Any
    metrics_path: str
    option: str = METRICS

    def last_calls(self) -> list[str]:
        """For each rank a sentence on where it was when the run was stopped."""
        return _last_calls(self.codes, self.waiting)


def run(script: Path | str, arguments: tuple[str, ...], ranks: int,
        failing_rank: int | None = None, seconds: float = SECONDS, hosts: int = 1,
        option: str | None = METRICS, written: str | None = None, shared: str | None = None) -> Run:
    """Runs `torchrun --nproc-per-node RANKS script arguments OPTION FILE` to its end or until it is
    stopped, in a folder of its own. failing_rank: one that raises while it trains. seconds: that it
    may take. hosts: as many the ranks believe in, by the variables that `torchrun --nnodes HOSTS`
    sets; a divisor of their number. option: METRICS or CHECKPOINT; None: the arguments are all.
    written: the file of METRICS, in the job's folder, where no option names it. shared: a folder
    that the arguments name: scripts/grade, which has another function here, lets the ranks run
    where the check's folders are not, and brings their files. Raises Stopped where it is
    interrupted."""
    with processes.temporary_folder() as folder:
        path = os.path.join(folder, written or _FILES.get(option, "no file"))
        arguments = (*arguments, option, path) if option else arguments
        job = ForkedJob(ranks, hosts, Path(folder, "notes"))
        try:
            job.start(str(Path(script).absolute()), arguments, folder,
                      seconds, failing_rank)
            job.wait()
        except KeyboardInterrupt:
            raise Stopped("\n".join(["interrupted; all ranks were stopped", *job.last_calls()])
                          ) from None
        finally:
            job.kill()
        return replace(job.result(arguments, path), option=METRICS if written else option or "")


def options(numbers: dict[str, float]) -> tuple[str, ...]:
    """The words of a command that set these options: --NAME NUMBER for each."""
    return tuple(word for name, number in numbers.items() for word in (f"--{name}", str(number)))


class ForkedJob:
    """The ranks of a job. notes: a new folder for what they note and print. variables: of their
    environment, in addition to torchrun's."""

    def __init__(self, ranks: int, hosts: int, notes: Path,
                 variables: dict[str, str] | None = None):
        self._more = variables or {}
        self._notes, self._ranks, self._hosts = notes, ranks, hosts
        self._notes.mkdir()
        self._processes, self._stopped, self._left = [], False, 0
        self._waits: dict[int, str] = {}  # of ranks that were stopped
        # Not rank 0's, on a port that is free now: while the fork server imports torch, another
        # program may take it, and ranks of two jobs would meet there.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def start(self, script: str, arguments: tuple[str, ...], folder: str, seconds: float,
              failing_rank: int | None = None, target: Callable = main, *others: object) -> None:
        """Starts target(RankStart, *others) for each rank. The first start waits until the fork
        server has imported torch."""
        self._script = os.path.basename(script)
        variables = _torchruns_variables(self._ranks, self._hosts, self._store.port)
        threads = int(variables["OMP_NUM_THREADS"])
        for rank in range(self._ranks):
            host, local = divmod(rank, self._ranks // self._hosts)
            own = {"RANK": rank, "LOCAL_RANK": local, "ROLE_RANK": rank, "GROUP_RANK": host}
            # RANK, LOCAL_RANK and GROUP_RANK as on `hosts` nodes of equally many ranks.
            self._processes.append(processes.start(target, (RankStart(
                script, tuple(map(str, arguments)), variables | self._more | {
                    name: str(value) for name, value in own.items()},
                str(folder), str(self._notes), threads, rank == failing_rank), *others)))
        self._watch = programs.StallWatch(lambda: self._groups, seconds, self._notes)

    @property
    def _groups(self) -> list[int]:
        return [process.pid for process in self._processes]

    @property
    def _codes(self) -> list[int | None]:
        return [process.exitcode for process in self._processes]

    def wait(self) -> None:
        """Returns when all ranks have ended; ends the others when one has failed."""
        failed_at = None
        while any(code is None for code in self._codes):
            if self._watch.is_over():
                self._stopped, self._waits = True, self._watch.waits
                return
            if failed_at is None and any(self._codes):
                # torchrun's agent does the same: one failed rank ends the others with SIGTERM.
                failed_at = time.monotonic()
                programs.end([process.pid for process in self._processes
                              if process.exitcode is None], signal.SIGTERM)
            if failed_at and time.monotonic() > failed_at + GRACE:
                return
            time.sleep(0.01)
        # Invariant: what the ranks started is gone with them. Not counted when the run was stopped.
        self._left = programs.count_left(self._groups)

    def kill(self) -> None:
        """Ends all ranks at once."""
        with processes.deferred():
            programs.end(self._groups)
            for process in self._processes:
                process.kill()  # also one that has no group of its own yet
                process.join(GRACE)

    def result(self, arguments: tuple[str, ...], path: str) -> Run:
        """What is left of the job. path: of the file of metrics."""
        counted = programs.noted(self._notes, "batch")
        codes = self._codes
        return Run(self._script, self._ranks, tuple(map(str, arguments)),
                   None if self._stopped else int(any(codes)), codes, self._watch.seconds,
                   [self._record(rank) for rank in range(self._ranks)],
                   [self._read(f"output-{rank}") for rank in range(self._ranks)],
                   [sum(who == str(rank) for who, _ in counted) for rank in range(self._ranks)],
                   self._called(), self._left, _written(path), path)

    def last_calls(self) -> list[str]:
        """For each rank that was started a sentence on where it is."""
        return _last_calls(self._codes, self._called())

    def _called(self) -> list[str]:
        """Where each rank was when it was stopped, else the last collective that it has called; ""
        where there is none."""
        called = {int(rank): f"had last called {name}"
                  for rank, name in programs.noted(self._notes, "called")} | self._waits
        return [called.get(rank, "") for rank in range(self._ranks)]

    def _record(self, rank) -> RankRecord | None:
        with contextlib.suppress(Exception):  # it was killed while it wrote, or before
            return RankRecord.load(self._notes / f"record-{rank}.pt")
        return None

    def _read(self, name) -> str:
        with contextlib.suppress(OSError):
            return (self._notes / name).read_text(errors="replace")[:_PRINTED]
        return ""


def _torchruns_variables(ranks, hosts, port) -> dict[str, str]:
    """What all ranks have in their environment: what torchrun sets, and that they find labs."""
    gpus = devices.gpus()
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), _ROOT]))
    numbers = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks // hosts, "ROLE_WORLD_SIZE": ranks,
               "GROUP_WORLD_SIZE": hosts, "MASTER_PORT": port,
               "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0,
               "OMP_NUM_THREADS": max(1, devices.cores() // ranks)}
    return {**programs.environment(), "PYTHONPATH": path, "PYTHONUNBUFFERED": "1",
            "MASTER_ADDR": "127.0.0.1", "ROLE_NAME": "default", "TORCHELASTIC_RUN_ID": "none",
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # no rank starts a store at that port
            **({} if gpus else {"CUDA_VISIBLE_DEVICES": ""}),
            # the flight recorder, which tells where a rank waits
            "TORCH_FR_BUFFER_SIZE": str(flight_recorder.RECORDED),
            "GLOO_SOCKET_IFNAME": worker.LOOPBACK, "NCCL_SOCKET_IFNAME": f"={worker.LOOPBACK}",
            **{name: str(value) for name, value in numbers.items()}}


def _last_calls(codes, called) -> list[str]:
    """codes: of the ranks that were started; below 0 where this process has ended one."""
    return [f"rank {rank} " + ("had ended" if code is not None and code >= 0 else
                               where or "had called no collective")
            for rank, (code, where) in enumerate(zip(codes, called, strict=False))]


def _written(path):
    with contextlib.suppress(Exception):  # torch.load raises what it likes
        if path.endswith(".pt"):
            return torch.load(path, weights_only=True, map_location="cpu")
        return json.loads(Path(path).read_text(encoding="utf-8"))
    return None
