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
from dataclasses import asdict
from pathlib import Path

from _grade import bubblewrap, cgroups, guard, namespaces, reach
from _grade.events import SEPARATOR
from _grade.files import Unreadable, plain
from _grade.limits import ANSWER, LOOK_MEMORY, LOOK_SECONDS
from _grade.outcomes import BROKEN, FORGED, NOT_ALLOWED, PASSED, TIMED_OUT, WAITING, WRONG, Graded

ROOT = Path(__file__).resolve().parents[2]
READY = 300  # seconds that the imports may take
_OUTCOMES = {b"1": PASSED, b"0": WRONG, b"-": WAITING}
_LONGEST = 64_000  # bytes of a verdict
# A breakpoint that was forgotten stops nothing; what is compiled would need a compiler.
_HARMLESS = {"PYTHONBREAKPOINT": "0", "TORCHDYNAMO_DISABLE": "1"}
_OF_ROLE = {
    "judge": {"WORKBOOK_GRADES": "1"},  # its verdicts say no right number (labs.checks.generator)
    "answer": _HARMLESS, "check": _HARMLESS}
GROUP_MEMORY = 6 * 10**9  # bytes, of all processes of an exercise together


class Unavailable(RuntimeError):
    """Namespaces are forbidden here."""


class Missing(RuntimeError):
    """bubblewrap is not installed."""


class Misplaced(RuntimeError):
    """A path that a submission needs lies where it would have an empty folder of its own."""


class Closed(RuntimeError):
    """A path that a submission needs is open to root alone."""


class Sandbox:
    """The zygote and what it forks. packages: what it imports; without, its forks only look at
    submissions. Threads may call `grade` and `look` at the same time."""

    def __init__(self, packages: list[str], isolated: bool = True, seconds: float = 120.0):
        self._shown = bubblewrap.shown_paths(ROOT)
        if isolated and not bubblewrap.program():
            raise Missing
        if isolated and (path := bubblewrap.hidden(self._shown)):
            raise Misplaced(path)
        if isolated and (path := _closed([*self._shown, str(ROOT / "scripts")])):
            raise Closed(path)
        self._isolated, self._seconds, self._looks = isolated, seconds, not packages
        self._lock, self._folder = threading.Lock(), tempfile.TemporaryDirectory(prefix="grade-")
        self._log = open(Path(self._folder.name) / "log", "wb")
        self._control, theirs = socket.socketpair()
        self._of_answers, answers = socket.socketpair()
        self._copies = Path(self._folder.name, "copies")
        self._copies.mkdir()
        self._copies.chmod(0o755)
        with theirs, answers:
            self._start(theirs, answers, packages)
        self._control.settimeout(READY)
        try:
            if self._line() != "ready":
                raise RuntimeError(f"the zygote did not start: {self.log()[-2000:]}")
        except BaseException:  # also an interrupt, because the imports take long
            self.close()
            raise

    def _start(self, theirs, answers, packages):
        """Starts the zygote: behind walls of its own, and not as root."""
        around, files, user, environment = [], [], 0, _environment()
        info, told = os.pipe()
        if self._isolated:
            scripts = str(ROOT / "scripts")
            around, files = bubblewrap.around_zygote([*self._shown, scripts], told,
                                                     str(self._copies))
            user = 60_000 + os.getpid() % 5_000 if os.geteuid() == 0 else 0
        else:  # it, too, leaves nothing behind
            environment |= {"HOME": self._folder.name, "TMPDIR": self._folder.name}
        self._process = subprocess.Popen(
            [*around, sys.executable, "-P", "-m", "_grade.zygote", str(theirs.fileno()),
             str(answers.fileno()), str(user), *packages],
            pass_fds=[theirs.fileno(), answers.fileno(), *files], stdin=subprocess.DEVNULL,
            stdout=self._log, stderr=self._log, cwd="/", start_new_session=True,
            env=environment | {"PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}"})
        for each in {*files, told}:
            os.close(each)
        try:
            self._first = bubblewrap.first_process(info)
        except OSError:  # not isolated, or not possible: then it says why
            self._first = os.pidfd_open(self._process.pid)

    def close(self) -> None:
        """Ends the zygote, and with it all that still runs."""
        self._control.close()
        self._of_answers.close()
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._first, signal.SIGKILL)
        os.close(self._first)
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
            if not piece and self.log().startswith("bwrap: "):
                raise Unavailable(self.log().splitlines()[0])
            if not piece:
                raise RuntimeError(f"the zygote has ended: {self.log()[-2000:]}")
            found += piece
        return found.decode().strip()

    def _started(self, control) -> int:
        """The descriptor of the process that the zygote has just forked."""
        said, descriptors, *_ = socket.recv_fds(control, 100, 1)
        if not descriptors:
            raise RuntimeError(f"the zygote has ended: {self.log()[-2000:]}")
        return descriptors[0]

    def probe(self) -> None:
        """Raises Unavailable unless what is handed in can be isolated here."""
        works = False
        if self._looks:
            try:
                self.look(b"{}", {"lessons": [], "imports": [], "apart": []})
            except Unreadable as error:
                works = str(error).startswith("is no notebook")
        else:
            works = self.grade({"probe": True}, seconds=60).outcome == PASSED
        if not works:
            raise Unavailable((self.log().strip().splitlines() or ["it says nothing"])[-1])

    def grade(self, work: dict, seconds: float | None = None) -> Graded:
        """Grades one exercise. work: what `_grade.inside` takes, as JSON, or `_grade.judge` where
        the exercise is judged apart."""
        began, seconds = time.monotonic(), seconds or self._seconds
        limits = namespaces.Limits(seconds=2 * math.ceil(seconds))
        seed, (sent, counts) = work.get("seed", ""), os.pipe()
        with open(sent, "rb") as sent:
            with open(counts, "wb"):
                if work.get("apart"):
                    found = self._grade_apart(work, limits, seconds, seed, counts)
                else:
                    secret = secrets.token_hex(16).encode()
                    said, alarms, in_time = self._run_submission(
                        secret + json.dumps(work).encode(), limits, seconds, _LONGEST, seed, counts)
                    found = _judged(said, alarms, in_time, secret, seconds)
            found.sent = int(sent.read() or 0)
        found.seconds = time.monotonic() - began
        return found

    def _grade_apart(self, work, limits, seconds, seed, counts) -> Graded:
        """In two process trees: the judge, which never runs a line of the submission's, and the
        submission, which never sees the seed. A socket between them is all that they share."""
        job = json.dumps(work).encode()
        theirs = json.dumps({name: work[name] for name in ("cells", "arguments")}).encode()
        with contextlib.ExitStack() as stack:
            judges, links = socket.socketpair()
            verdict, verdict_write = os.pipe()
            stack.callback(os.close, verdict)
            with judges, links, open(verdict_write, "wb"):  # closed here when the forks have them
                stack.enter_context(self._tree("answer", theirs, limits, "", links.fileno(),
                                               counts=counts,
                                               labs=self._copy_of_labs(work["modules"])))
                judge = stack.enter_context(self._tree(
                    "judge", job, limits, seed, verdict_write, judges.fileno()))
            nothing = os.open("/dev/null", os.O_RDONLY)
            stack.callback(os.close, nothing)
            said, _, in_time = _listen(judge, verdict, nothing, seconds, _LONGEST)
        if not in_time:
            return Graded(TIMED_OUT, f"not done after {seconds:g} s: is there an endless loop?")
        if not said:
            return Graded(BROKEN, "the judge ended before it said anything")
        outcome, sentence, hint = json.loads(said)
        return Graded(outcome, plain(sentence), hint)

    def _copy_of_labs(self, modules: list[str]) -> str:
        """The folder, for the zygote, of a copy of labs with these modules alone."""
        name = hashlib.sha256(" ".join(modules).encode()).hexdigest()[:16]
        with self._lock:
            if not (self._copies / name).exists():
                reach.copy(modules, self._copies / name)
        return f"{bubblewrap.COPIES}/{name}"

    def look(self, data: bytes, known: dict) -> dict:
        """What `look.look_through` returns of a file's bytes. known: `look.Known`, as JSON. Raises
        Unreadable."""
        job = b"%032d" % 0 + json.dumps(known).encode() + b"\n" + data
        limits = namespaces.Limits(memory=LOOK_MEMORY, seconds=math.ceil(LOOK_SECONDS))
        said, _, in_time = self._run_submission(job, limits, 2 * LOOK_SECONDS, ANSWER)
        if not in_time:
            raise Unreadable(f"takes more than {LOOK_SECONDS:g} s to look through")
        if len(said) >= ANSWER:
            raise Unreadable("has more code than can be looked through")
        try:
            found = json.loads(said)
        except ValueError:
            raise Unreadable(f"cannot be looked through: that took more than {LOOK_SECONDS:g} s "
                             f"or {LOOK_MEMORY / 1e9:g} GB, or ended Python's parser") from None
        if why := found.get("unreadable"):
            raise Unreadable(why)
        return found

    def _run_submission(self, job, limits, seconds, longest, seed="", counts=None):
        """(what came on the verdict's pipe, what on the alarm's, whether it ended in time) of a
        process tree that a fork of the zygote begins."""
        with contextlib.ExitStack() as stack:
            pipes = [os.pipe() for _ in range(2)]
            (verdict, verdict_write), (alarm, alarm_write) = pipes
            for each in (verdict, alarm):
                stack.callback(os.close, each)
            with open(verdict_write, "wb"), open(alarm_write, "wb"):
                process = stack.enter_context(self._tree(
                    "look" if self._looks else "check", job, limits, seed, verdict_write,
                    alarm_write, counts=counts))
            return _listen(process, verdict, alarm, seconds, longest)

    @contextlib.contextmanager
    def _tree(self, role: str, job: bytes, limits, seed: str, *descriptors: int,
              counts: int | None = None, labs: str = ""):
        """Starts a process tree, and ends it with the block; a descriptor of its first process.
        role: what it does with its job (zygote). descriptors: what it gets; close them here.
        counts: takes the bytes that its ranks sent, at its end. labs: the folder that it sees as
        labs, where it is another one."""
        control = self._of_answers if role == "answer" else self._control
        with contextlib.ExitStack() as stack:
            plan = {"role": role, "shown": self._shown, "root": str(ROOT),
                    "limits": asdict(limits), "isolated": self._isolated,
                    "counts": counts is not None,
                    "instead": [str(ROOT / "labs"), labs] if labs else None,
                    "environment": _environment(role) | {"WORKBOOK_SEED": seed}}
            if not self._isolated:
                plan["folder"] = stack.enter_context(tempfile.TemporaryDirectory(
                    dir=self._folder.name))
            group = cgroups.Group(f"workbook-{os.getpid()}-{secrets.token_hex(4)}", GROUP_MEMORY,
                                  namespaces.Limits.processes)
            stack.callback(group.remove)
            job_read, job_write = os.pipe()
            try:
                with self._lock:
                    socket.send_fds(control, [json.dumps(plan).encode()],
                                    [job_read, *descriptors, *([] if counts is None else
                                                               [counts])])
                    process = self._started(control)
            finally:
                os.close(job_read)
            try:
                # it waits for its job before it does anything
                group.take(namespaces.number_of(process))
                threading.Thread(target=_write, args=(job_write, job), daemon=True).start()
                yield process
            finally:
                _end(process)
                os.close(process)


def _closed(paths) -> str:
    """As root, the first of some folders that another user may not read; or empty."""
    if os.geteuid() != 0:
        return ""
    return next((path for path in paths if os.stat(path).st_mode & 0o005 != 0o005), "")


def _write(descriptor, data):
    with contextlib.suppress(OSError), open(descriptor, "wb") as file:
        file.write(data)


def _listen(process, verdict, alarm, seconds, longest) -> tuple[bytes, bytes, bool]:
    """(what came on the verdict's pipe, what on the alarm's, whether it ended in time)."""
    deadline, heard = time.monotonic() + seconds, {verdict: bytearray(), alarm: bytearray()}
    open_ones = [verdict, alarm, process]
    while process in open_ones:
        left = deadline - time.monotonic()
        if left <= 0:
            return bytes(heard[verdict]), bytes(heard[alarm]), False
        for each in select.select(open_ones, [], [], left)[0]:
            piece = b"" if each == process else os.read(each, 1 << 16)
            if not piece:
                open_ones.remove(each)
            elif len(heard[each]) < longest:
                heard[each] += piece
        if heard[alarm].endswith(b"\n"):
            break
    for each in (verdict, alarm):  # what came together with the end
        if each in open_ones and select.select([each], [], [], 0)[0]:
            heard[each] += os.read(each, 1 << 16)
    return bytes(heard[verdict]), bytes(heard[alarm]), True


def _end(process):
    """Ends the tree, if it still runs, and waits until nothing is left of it."""
    for sent, patience in ((signal.SIGTERM, 10), (signal.SIGKILL, 10)):
        if select.select([process], [], [], 0)[0]:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, sent)
        if select.select([process], [], [], patience)[0]:
            return
    raise RuntimeError("a submission's processes do not end")


def _judged(said, alarms, in_time, secret, seconds) -> Graded:
    if alarms:
        first = plain(alarms.decode(errors="replace").split("\n")[0])
        for mark, outcome in ((guard.FORGED, FORGED), (guard.NOT_ALLOWED, NOT_ALLOWED)):
            if first.startswith(mark):
                return Graded(outcome, first.removeprefix(mark))
        return Graded(FORGED, "writes into the grader's descriptors")
    if not in_time:
        return Graded(TIMED_OUT, f"not done after {seconds:g} s: is there an endless loop?")
    if not said:
        return Graded(BROKEN, "its processes ended before the check said anything: killed, out of "
                              "memory, or ended by themselves")
    seal, _, rest = said.partition(SEPARATOR)
    if seal != hashlib.sha256(secret + rest + secret).hexdigest().encode():
        return Graded(FORGED, "writes a verdict of its own")
    outcome, sentence, hint = rest.split(SEPARATOR, 2)
    return Graded(_OUTCOMES[outcome], plain(sentence.decode()), hint.decode())


def _environment(role: str = "") -> dict[str, str]:
    """What a submission's processes have in their environment. role: as of `Sandbox._tree`."""
    path = f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin"
    return {"PATH": path, "HOME": bubblewrap.HOME, "USER": "student", "LANG": "C.UTF-8",
            "TMPDIR": "/tmp", "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MPLBACKEND": "agg",
            "CUDA_VISIBLE_DEVICES": "", "WORKBOOK_PRESET": "laptop", **_OF_ROLE.get(role, {})}
