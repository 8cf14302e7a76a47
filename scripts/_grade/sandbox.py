"""Runs one exercise of one submission in a process tree of its own, and reads its verdict."""

import contextlib
import hashlib
import json
import math
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from _grade import cgroups, namespaces
from _grade.guard import MARK
from _grade.inside import SEPARATOR

ROOT = Path(__file__).resolve().parents[2]
READY = 300  # seconds that the imports may take
PASSED, WRONG, WAITING, FLAGGED, TIMED_OUT, BROKEN = (
    "passed", "wrong", "waiting", "flagged", "timed out", "no verdict")
_OUTCOMES = {b"1": PASSED, b"0": WRONG, b"-": WAITING}
_LONGEST = 64_000  # bytes of a verdict
GROUP_MEMORY = 6 * 10**9  # bytes, of all processes of an exercise together


@dataclass
class Graded:
    """The outcome of one exercise: one of the words above. sentence: the check's, or what the
    exercise is flagged for."""

    outcome: str
    sentence: str = ""
    hint: str = ""
    seconds: float = 0.0


class Unavailable(RuntimeError):
    """Namespaces are forbidden here."""


class Misplaced(RuntimeError):
    """A path that a submission needs lies where it would have an empty folder of its own."""


class Sandbox:
    """The zygote and what it forks. Threads may call `grade` at the same time."""

    def __init__(self, packages: list[str], isolated: bool = True, seconds: float = 120.0):
        if isolated and (path := namespaces.hidden(namespaces.shown_paths(ROOT))):
            raise Misplaced(path)
        self._isolated, self._seconds = isolated, seconds
        self._lock, self._folder = threading.Lock(), tempfile.TemporaryDirectory(prefix="grade-")
        os.chmod(self._folder.name, 0o711)  # to be passed through by the user of the namespaces
        ours, theirs = socket.socketpair()
        self._control = ours
        self._log = open(Path(self._folder.name) / "log", "wb")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "_grade.zygote", str(theirs.fileno()), *packages],
            pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=self._log,
            stderr=self._log, cwd="/", env=_environment() | {
                "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}"}, start_new_session=True)
        theirs.close()
        self._control.settimeout(READY)
        if self._line() != "ready":
            raise RuntimeError(f"the zygote did not start: {self.log()[-2000:]}")

    def close(self) -> None:
        """Ends the zygote, and with it all that still runs."""
        self._control.close()
        self._process.kill()
        self._process.wait()
        self._log.close()
        self._folder.cleanup()

    def log(self) -> str:
        """What the zygote and the submissions' processes printed."""
        return (Path(self._folder.name) / "log").read_text(errors="replace")

    def _line(self) -> str:
        found = b""
        while not found.endswith(b"\n"):
            piece = self._control.recv(100)
            if not piece:
                raise RuntimeError(f"the zygote has ended: {self.log()[-2000:]}")
            found += piece
        return found.decode().strip()

    def probe(self) -> None:
        """Raises Unavailable unless an exercise can be isolated here."""
        found = self.grade({"probe": True}, seconds=60)
        if found.outcome != PASSED:
            raise Unavailable((self.log().strip().splitlines() or ["it says nothing"])[-1])

    def grade(self, work: dict, seconds: float | None = None) -> Graded:
        """Grades one exercise. work: what `_grade.inside` takes, as JSON."""
        began = time.monotonic()
        secret = secrets.token_hex(16).encode()
        with tempfile.TemporaryDirectory(dir=self._folder.name) as stage:
            os.chmod(stage, 0o755)
            group = cgroups.Group(f"workbook-{os.getpid()}-{secrets.token_hex(4)}", GROUP_MEMORY,
                                  namespaces.Limits.processes)
            try:
                found = self._run_exercise(stage, group, secret, work, seconds or self._seconds)
            finally:
                group.remove()
        found.seconds = time.monotonic() - began
        return found

    def _run_exercise(self, stage, group, secret, work, seconds) -> Graded:
        job = secret + json.dumps(work).encode()
        pipes = [os.pipe() for _ in range(3)]
        (job_read, job_write), (verdict, verdict_write), (alarm, alarm_write) = pipes
        process = None
        try:
            limits = namespaces.Limits(seconds=2 * math.ceil(seconds))
            plan = {"stage": stage, "shown": namespaces.shown_paths(ROOT), "root": str(ROOT),
                    "limits": asdict(limits), "cgroups": group.members,
                    "isolated": self._isolated,
                    "environment": _environment() | {"WORKBOOK_SEED": work.get("seed", "")}}
            with self._lock:
                socket.send_fds(self._control, [json.dumps(plan).encode()],
                                [job_read, verdict_write, alarm_write])
                # it waits for its job before it does anything, so it cannot have ended yet
                process = os.pidfd_open(number := int(self._line()))
        finally:
            for each in (job_read, verdict_write, alarm_write):
                os.close(each)
        try:
            threading.Thread(target=_write, args=(job_write, job), daemon=True).start()
            said, alarms, in_time = _listen(process, verdict, alarm, seconds)
        finally:
            _end(process, number)
            for each in (verdict, alarm, process):
                os.close(each)
        return _judged(said, alarms, in_time, secret, seconds)


def _write(descriptor, data):
    with contextlib.suppress(OSError), open(descriptor, "wb") as file:
        file.write(data)


def _listen(process, verdict, alarm, seconds) -> tuple[bytes, bytes, bool]:
    """(what came on the verdict's pipe, what on the alarm's, whether it ended in time)."""
    deadline, heard = time.monotonic() + seconds, {verdict: b"", alarm: b""}
    open_ones = [verdict, alarm, process]
    while process in open_ones:
        left = deadline - time.monotonic()
        if left <= 0:
            return heard[verdict], heard[alarm], False
        for each in select.select(open_ones, [], [], left)[0]:
            piece = b"" if each == process else os.read(each, 1 << 16)
            if not piece:
                open_ones.remove(each)
            elif len(heard[each]) < _LONGEST:
                heard[each] += piece
        if heard[alarm].endswith(b"\n"):
            break
    for each in (verdict, alarm):  # what came together with the end
        if each in open_ones and select.select([each], [], [], 0)[0]:
            heard[each] += os.read(each, _LONGEST)
    return heard[verdict], heard[alarm], True


def _end(process, number):
    """Ends the tree, if it still runs, and waits until nothing is left of it."""
    for sent, patience in ((signal.SIGTERM, 10), (signal.SIGKILL, 10)):
        if select.select([process], [], [], 0)[0]:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, sent)
        if select.select([process], [], [], patience)[0]:
            return
    raise RuntimeError(f"process {number} of a submission does not end")


def _judged(said, alarms, in_time, secret, seconds) -> Graded:
    if alarms:
        first = alarms.decode(errors="replace").splitlines()[0]
        return Graded(FLAGGED, first.removeprefix(MARK) if first.startswith(MARK) else
                      "writes into the grader's descriptors")
    if not in_time:
        return Graded(TIMED_OUT, f"not done after {seconds:g} s: is there an endless loop?")
    if not said:
        return Graded(BROKEN, "its processes ended before the check said anything: killed, out of "
                              "memory, or ended by themselves")
    seal, _, rest = said.partition(SEPARATOR)
    if seal != hashlib.sha256(secret + rest + secret).hexdigest().encode():
        return Graded(FLAGGED, "writes a verdict of its own")
    outcome, sentence, hint = rest.split(SEPARATOR, 2)
    return Graded(_OUTCOMES[outcome], sentence.decode(), hint.decode())


def _environment() -> dict[str, str]:
    """What a submission's processes have in their environment."""
    path = f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin"
    return {"PATH": path, "HOME": namespaces.HOME, "USER": "student", "LANG": "C.UTF-8",
            "TMPDIR": "/tmp", "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MPLBACKEND": "agg",
            "CUDA_VISIBLE_DEVICES": "", "WORKBOOK_PRESET": "laptop"}
