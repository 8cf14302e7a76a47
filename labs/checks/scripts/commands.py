"""Starts a command such as torchrun as a terminal would, shows what it prints while it runs, and
leaves no process behind."""

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector

import psutil

from labs.checks.scripts.files import missing_script, waiting_exercise
from labs.checks.verdicts import Verdict
from labs.workers import devices, processes, programs, worker
from labs.workers.launch_error import Stopped
from labs.workers.output import LaunchOutput

SECONDS = 180.0  # that a command may take
ALONE = 2.0  # seconds in which a command's processes must end after it
GONE_AFTER = 10.0  # seconds in which a process must have gone that was killed
LOOK = 0.02  # seconds between two calls of a function that watches a command
_ROOT = str(Path(__file__).resolve().parents[3])
# Runs a module as `python -m` does. On Linux it gets SIGTERM when the notebook's kernel ends, also
# by kill -9: torchrun and accelerate then end their ranks.
_MODULE = """\
import contextlib, ctypes, runpy, signal, sys
with contextlib.suppress(Exception):
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
_MODULES = {"torchrun": "torch.distributed.run",
            "accelerate": "accelerate.commands.accelerate_cli"}
# Where these words begin a command, the option that names the folder for what torchrun notes:
# without it a folder torchelastic_* stays in the system's for temporary files after each run.
_LOG_OPTIONS = {("torchrun",): "--log-dir", ("accelerate", "launch"): "--log_dir"}


@dataclass(frozen=True)
class CommandResult:
    """What a command left: its words, its exit code (None where it was stopped after its time), the
    seconds that it took, all that it printed, and when it began, in seconds since the epoch."""

    command: tuple[str, ...]
    code: int | None
    seconds: float
    output: str
    began: float = 0.0

    def __repr__(self):
        end = "stopped" if self.code is None else f"exit code {self.code}"
        return f"{end} after {self.seconds:.0f} s"


def torchrun(script: str, *arguments: object, ranks: int | None = None,
             seconds: float = SECONDS) -> CommandResult | Verdict:
    """Runs `torchrun --standalone --nproc-per-node RANKS script arguments`, as a terminal would. A
    script with a gap is not started. ranks: None means what the machine offers."""
    return run_command(["torchrun", "--standalone", "--nproc-per-node",
                        ranks or devices.default_ranks(), script, *arguments], seconds)


def run_command(command: list[object], seconds: float = SECONDS,
                environment: dict[str, str] | None = None,
                watch: Callable[[int, str], None] | None = None) -> CommandResult | Verdict:
    """Runs a command in the working folder, and shows what it prints. Its first word may be
    torchrun or accelerate. Stops it after so many seconds. Returns a Verdict where a script among
    its words has a gap that waits for an exercise, and where the script or the command is missing.
    environment: variables to set in addition. watch: called many times while the command runs, with
    the number of its process and all that it has printed; then nothing of it is shown."""
    words = [str(word) for word in command]
    if refused := _refusal(words):
        return refused
    if not watch:
        print(f"$ {shlex.join(words)}", flush=True)
    try:
        with processes.temporary_folder() as logs:
            return _run(words, logs, seconds, environment or {}, watch)
    except KeyboardInterrupt:
        raise Stopped(f"interrupted; {words[0]} was stopped, with all that it had started"
                      ) from None


def run_module(module: str, *arguments: object, seconds: float = SECONDS,
               environment: dict[str, str] | None = None) -> CommandResult:
    """Runs `python -m module arguments` as `run_command` runs a command, but names no command."""
    words = [sys.executable, "-c", _MODULE, module, *map(str, arguments)]
    try:
        return _run(words, "", seconds, environment or {})
    except KeyboardInterrupt:
        raise Stopped("interrupted; what had been started was stopped") from None


def _refusal(words) -> Verdict | None:
    waits = [number for word in words if (number := waiting_exercise(word))]
    if waits:
        return Verdict(waits[0], None, "is waiting for your code")
    if words[0] not in _MODULES and not shutil.which(words[0]):
        return Verdict(words[0], False, "there is no such command", code="no_such_command")
    script = next((word for word in words if word.endswith(".py")), None)
    sentence = missing_script(script) if script and words[0] in _MODULES else None
    return Verdict(words[0], False, sentence, code="file_missing") if sentence else None


def _run(words, logs, seconds, environment, watch=None) -> CommandResult:
    started_at, began, process, family = time.time(), time.monotonic(), None, _Family()
    try:
        with processes.deferred():  # an interrupt must not come before it has a name here
            process = subprocess.Popen(
                _python(words, logs), env=_environment(_ranks(words)) | environment,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                start_new_session=True)
        output = _shown(process, began + seconds, watch, family)
        code = process.poll()
    finally:
        with processes.deferred():
            if process:
                _end(process, family)
    return CommandResult(tuple(words), code, time.monotonic() - began, output, started_at)


def _python(words, logs) -> list[str]:
    for beginning, option in _LOG_OPTIONS.items():
        if tuple(words[:len(beginning)]) == beginning:
            words = [*beginning, option, logs, *words[len(beginning):]]
    if words[0] in _MODULES:  # of this Python, whether or not its scripts are on the PATH
        return [sys.executable, "-c", _MODULE, _MODULES[words[0]], *words[1:]]
    return words


def _ranks(words) -> int:
    for name in ("--nproc-per-node", "--nproc_per_node", "--num_processes"):
        if name in words[:-1] and words[words.index(name) + 1].isdigit():
            return int(words[words.index(name) + 1])
    return 1


def _environment(ranks) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), _ROOT]))
    return {**programs.environment(), "PYTHONPATH": path, "PYTHONUNBUFFERED": "1",
            # torchrun sets it too, to 1, and says so in four lines
            "OMP_NUM_THREADS": str(max(1, devices.cores() // ranks)),
            "GLOO_SOCKET_IFNAME": worker.LOOPBACK, "NCCL_SOCKET_IFNAME": f"={worker.LOOPBACK}"}


def _shown(process, deadline, watch, family) -> str:
    """All that the process prints until it ends, or until the deadline; shown as it comes, or given
    to `watch`."""
    output = LaunchOutput(1, quiet=watch is not None, who="")
    with DefaultSelector() as pipes:
        pipes.register(process.stdout, EVENT_READ)
        while time.monotonic() < deadline:
            if (pipes.select(LOOK if watch else 0.1)
                    and not output.read(0, process.stdout.fileno())):
                break
            output.show()
            if watch:
                watch(process.pid, output.text[0])
            # Also without an end of the output: an orphan of the command may keep the pipe open for
            # ever.
            if family.look(process):
                break
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(max(0.0, min(10.0, deadline - time.monotonic())))
    output.finish()
    return output.text[0]


class _Family:
    """The processes that a command has started, also those that are left when it was killed."""

    def __init__(self):
        self.members, self._asked, self._ended = set(), 0.0, None

    def look(self, process: subprocess.Popen) -> bool:
        """Notes who is there, a few times a second. Returns whether the command has ended some time
        ago: who still holds its output then has been left alone."""
        now = time.monotonic()
        if now > self._asked + 0.3:
            self._asked = now
            with contextlib.suppress(psutil.Error):
                self.members |= set(psutil.Process(process.pid).children(recursive=True))
            if self._ended is None and process.poll() is not None:
                self._ended = now
        return self._ended is not None and now > self._ended + ALONE


def _end(process, family):
    """Ends it with all processes that it started: torchrun's ranks have sessions of their own."""
    found = family.members
    with contextlib.suppress(psutil.Error):
        found = found | set(psutil.Process(process.pid).children(recursive=True))
        # First SIGTERM: torchrun then ends its ranks and removes its files.
        process.terminate()
        psutil.wait_procs(found, timeout=2)
    for child in found:
        with contextlib.suppress(psutil.Error):
            child.kill()  # psutil: not another process that has got its number
    process.kill()
    process.wait()
    process.stdout.close()
    # What is killed takes a time to go on a busy machine; some of it is no child of this process.
    until = time.monotonic() + GONE_AFTER
    while any(map(_runs, found)) and time.monotonic() < until:
        time.sleep(0.01)


def _runs(process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
