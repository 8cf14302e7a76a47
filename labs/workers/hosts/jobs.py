"""A command that runs on several hosts: its output, its exit codes, its end."""

import os
import re
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from selectors import EVENT_READ, DefaultSelector

from labs.words import listed, plural
from labs.workers.hosts.links import LinkBytes
from labs.workers.launch_error import LaunchError, Stopped
from labs.workers.output import LaunchOutput, cut, last_lines

GRACE = 10.0  # seconds that the other hosts may go on when the command failed on one
NAME = 120  # characters of a command in a message
_ERROR_LINE = re.compile(r"(?:rank \d+ │ )?(?:\[rank\d+\]: )?"
                         r"((?:\w+\.)*\w*(?:Error|Exception)\b.*)")
# torchrun's report, at the end of what it prints on the host of the rank
_ROOT_CAUSE = re.compile(r"Root Cause.*?\n  rank +: (\d+) .*?\n  exitcode +: (-?\d+) ", re.DOTALL)


@dataclass(frozen=True)
class JobResult:
    """What a job left, by the number of the host. commands: what was started there. output: all
    that it printed. exit_codes: 128 + n where signal n ended it. bytes: what passed the link of
    each host, of the job or not, from its start to its end, in seconds."""

    commands: dict[int, list[str]]
    output: dict[int, str]
    exit_codes: dict[int, int]
    bytes: list[LinkBytes]
    seconds: float


class JobFailed(LaunchError):
    """A job ended with an exit code other than 0 on some host, or ran out of time.

    host: the first one on which it failed, or None. result: a JobResult of what there is.
    """

    def __init__(self, message: str, host: int | None, result: JobResult):
        super().__init__(message)
        self.host, self.result = host, result
        self.output = list(result.output.values())


class HostsJob:
    """A command that was started on hosts. processes: from the number of a host to the process
    that waits for the command there; killing it ends the command and all that it started."""

    def __init__(self, processes: dict[int, subprocess.Popen], commands: dict[int, list[str]],
                 read_bytes: Callable[[], list[LinkBytes]], is_alive: Callable[[int], bool],
                 quiet: bool):
        self.commands = commands
        self._processes, self._read_bytes, self._is_alive = processes, read_bytes, is_alive
        self._output = LaunchOutput(1 + max(processes), quiet, who="host")
        self._exit_codes: dict[int, int] = {}  # in the order in which they ended
        self._failed_at = None  # when it failed on the first host
        self._is_shown = False  # all of its output
        self._bytes = self._bytes_before = read_bytes()
        self._began, self._seconds = time.monotonic(), None
        self._lock, self._ended = threading.Lock(), threading.Event()
        # Daemon: a job that nobody waits for must not keep the kernel from ending.
        threading.Thread(target=self._listen, name="hosts-output", daemon=True).start()

    @property
    def running(self) -> bool:
        """Whether it still runs on some host."""
        return not self._ended.is_set()

    def wait(self, timeout: float | None = None, check: bool = True) -> JobResult:
        """Shows what the hosts print until all have ended, and returns what they left.

        timeout: seconds from the job's start; then it is stopped on all hosts, as it is 10 seconds
        after it failed on one. Raises JobFailed in both cases, unless check=False. That a host was
        killed by `kill()` is no failure of the job.
        """
        late = False
        try:
            while self.running and not late:
                self._show(0.05)
                late = timeout is not None and time.monotonic() - self._began > timeout
                if self._failed_at and time.monotonic() - self._failed_at > GRACE:
                    break
        except KeyboardInterrupt:
            where = _named_hosts(self.stop()) or "all hosts"
            raise Stopped(f"interrupted; {self._name} was stopped on {where}") from None
        finally:
            stopped = self.stop()
        late = late and bool(stopped)
        if check and (late or self._first_failure is not None):
            raise JobFailed(self._explain(timeout if late else None, stopped),
                            None if late else self._first_failure, self.result())
        return self.result()

    def wait_for(self, text: str, timeout: float = 60.0) -> None:
        """Shows what the hosts print until one of them has printed `text`. Raises JobFailed if the
        job ends, or `timeout` seconds pass, before it did."""
        deadline = time.monotonic() + timeout
        while True:
            running = self.running  # asked first: what it prints at its end counts
            self._show(0.05)
            if any(text in output.text for output in self._output.by_rank):
                return
            if not running:
                raise JobFailed(f"{self._name} ended before it printed {text!r}",
                                self._first_failure, self.result())
            if time.monotonic() > deadline:
                raise JobFailed(f"{self._name} had not printed {text!r} after {timeout:g} s",
                                None, self.result())

    def stop(self) -> list[int]:
        """Ends it where it still runs, with all processes that it started, and returns these
        hosts."""
        running = [host for host in self._processes if host not in self._exit_codes]
        for host in running:
            self._processes[host].kill()
        self._ended.wait()
        with self._lock:
            if not self._is_shown:
                self._is_shown = True
                self._output.finish()
        return running

    def result(self) -> JobResult:
        """What there is by now."""
        now = self._read_bytes() if self.running else self._bytes
        seconds = self._seconds or time.monotonic() - self._began
        with self._lock:
            return JobResult(self.commands,
                             {host: self._output.text[host] for host in self.commands},
                             dict(sorted(self._exit_codes.items())),
                             [after - before for after, before in
                              zip(now, self._bytes_before, strict=True)], seconds)

    def _listen(self):
        """In a thread of its own, so that a job in the background never waits for a reader."""
        with DefaultSelector() as pipes:
            for host, process in self._processes.items():
                pipes.register(process.stdout, EVENT_READ, host)
            while pipes.get_map():
                for key, _ in pipes.select():
                    with self._lock:
                        more = self._output.read(key.data, key.fd)
                    if not more:  # every process that could write to it has ended
                        pipes.unregister(key.fileobj)
                        self._on_exit(key.data)
        self._bytes, self._seconds = self._read_bytes(), time.monotonic() - self._began
        self._ended.set()

    def _on_exit(self, host):
        process = self._processes[host]
        code = process.wait()
        process.stdout.close()
        if code and self._is_alive(host) and not self._failed_at:
            self._failed_at = time.monotonic()
        self._exit_codes[host] = 128 - code if code < 0 else code

    def _show(self, seconds):
        self._ended.wait(seconds)
        with self._lock:
            self._output.show()

    # what went wrong

    @property
    def _name(self) -> str:
        first = next(iter(self.commands.values()))
        words = ["torchrun", *first[first.index("--tee") + 2:]] if "--tee" in first else first
        return f"`{cut(' '.join(shlex.join(words).split()), NAME)}`"

    @property
    def _first_failure(self) -> int | None:
        """The host of a rank that a signal killed, because others then lose their connection to
        it; else the first one on which the job failed."""
        failed = [host for host, code in self._exit_codes.items() if code and self._is_alive(host)]
        killed = [host for host in failed if self._failed_rank(host)[1] < 0]
        return next(iter([*killed, *failed]), None)

    def _failed_rank(self, host) -> tuple[int | None, int]:
        """(rank, exit code) of the rank that failed first on a host, as torchrun reports it; the
        number of the signal that killed it is below 0."""
        found = _ROOT_CAUSE.search(self._output.text[host])
        return (int(found[1]), int(found[2])) if found else (None, 0)

    def _explain(self, timeout, stopped) -> str:
        where = _named_hosts(stopped)
        if timeout:
            return f"{self._name} was not done after {timeout:g} s on {where}, and was stopped"
        end = f" It was stopped on {where}." if stopped else ""
        first = self._first_failure
        rank, code = self._failed_rank(first)
        if code < 0:
            return (f"{self._name} failed: rank {rank} on host {first} was killed "
                    f"({signal.Signals(-code).name}).{end}")
        return (f"{self._name} {describe_exit(self._exit_codes[first])} on host {first}"
                f"{self._said(first)}.{end}")

    def _said(self, host) -> str:
        """The first line of its output that names an exception other than torchrun's own; else
        which rank failed, or else the last line."""
        lines = last_lines(self._output.text[host], most=400)
        found = [match[1] for match in map(_ERROR_LINE.match, lines)
                 if match and "ChildFailedError" not in match[1]]
        rank, code = self._failed_rank(host)
        found = found or [f"rank {rank} {describe_exit(code)}"] * bool(code) or lines[-1:]
        return f": {found[0].strip().rstrip('.')}" if found else ""


def _named_hosts(hosts) -> str:
    return f"{plural('host', len(hosts))} {listed(hosts)}" if hosts else ""


def describe_exit(code: int) -> str:
    """`exited with code 3`, `was killed by SIGKILL`: of an exit code as a shell reports it."""
    if code > 128 and code - 128 in {number.value for number in signal.Signals}:
        return f"was killed by {signal.Signals(code - 128).name}"
    return f"exited with code {code}"


def start_process(command: list[str], folder: str, environment: dict[str, str],
                  ) -> subprocess.Popen:
    """Starts one host's process of a job; its output comes over a pipe."""
    return subprocess.Popen(command, cwd=folder, env=environment, stdin=subprocess.DEVNULL,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            start_new_session=True)


def contained(command: list[str], folder: str) -> list[str]:
    """The command in a pid namespace of its own: whatever it started ends with it, also ranks
    whose torchrun was killed.

    `sh` is the first process there, since the kernel treats that one differently: it would survive
    signals that the command sends to itself.
    """
    return ["setpriv", "--pdeathsig", "KILL",
            "unshare", "--pid", "--fork", "--kill-child", "--mount-proc",
            "sh", "-c", 'cd "$1" && shift && "$@"; exit $?', "sh", os.path.abspath(folder),
            *command]
