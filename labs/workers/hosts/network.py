"""`hosts`: several hosts on this machine, with links of a chosen bandwidth and latency."""

import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence

import psutil

from labs.words import counted
from labs.workers.hosts import links, torchrun
from labs.workers.hosts.jobs import HostsJob, JobResult, contained, start_process
from labs.workers.hosts.links import LinkBytes, link_bytes
from labs.workers.hosts.namespaces import PATH, HostsUnavailable, Namespaces
from labs.workers.launch_error import LaunchError

MAX_HOSTS = 16
Command = Sequence[str] | Callable[["Host"], Sequence[str]]


def hosts(number: int = 2, bandwidth: str | None = None, latency: str | None = None) -> "Hosts":
    """Several hosts on this machine, for a with-block: they exist while it is open.

    Each host has its own network, addresses, host name and processes, and one link to a switch;
    files, cores and memory are this machine's. bandwidth: of each link and direction, as
    "200mbit". latency: from one host to another, in one direction, as "1ms". Neither needs rights
    of an administrator. Raises HostsUnavailable where the machine cannot have hosts.
    """
    return Hosts(number, bandwidth, latency)


def hosts_unavailable() -> str | None:
    """Returns why this machine cannot have hosts, and what to do, in a sentence; None if it can."""
    try:
        with Hosts(1, "1gbit", None):
            return None
    except HostsUnavailable as error:
        return str(error)


class Hosts(Sequence):
    """The hosts of a with-block; an entry is a Host. bits_per_second, and latency in seconds: what
    each link was given, or None."""

    def __init__(self, number: int, bandwidth: str | None, latency: str | None):
        if number not in range(1, MAX_HOSTS + 1):
            raise ValueError(f"hosts({number}): from 1 to {MAX_HOSTS} hosts are possible")
        self.bits_per_second = links.read_bandwidth(bandwidth) if bandwidth else None
        self.latency = links.read_latency(latency) if latency else None
        self._addresses = [f"10.0.0.{index + 1}" for index in range(number)]
        self._hosts: list[Host] = []
        self._jobs: list[HostsJob] = []
        self._numbers = itertools.count()
        self._namespaces = None

    def __enter__(self) -> "Hosts":
        bucket = links.token_bucket(self.bits_per_second) if self.bits_per_second else ""
        # Two hosts that send to a third one share its link.
        shared = len(self._addresses) > 2
        self._namespaces = Namespaces({
            "addresses": self._addresses, "bucket": bucket, "delay": self.latency,
            "port_bucket": bucket if shared else "",
            "port_rate": self.bits_per_second if shared else None})
        self._hosts = [Host(index, address, self._namespaces)
                       for index, address in enumerate(self._addresses)]
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Ends all jobs and removes the hosts."""
        namespaces, self._namespaces = self._namespaces, None
        if namespaces:
            try:
                for job in self._jobs:
                    job.stop()
            finally:
                namespaces.end()

    def __len__(self) -> int:
        return len(self._addresses)

    def __getitem__(self, index):
        self._raise_if_closed()
        return self._hosts[index]

    def run(self, command: Command, on: int | Sequence[int] | None = None,
            timeout: float | None = 300.0, check: bool = True, **options) -> JobResult:
        """Runs a command on all hosts, or on some, shows what it prints, and waits for its end.

        command: the words of a command line; with `torchrun` as the first one, what torchrun needs
        to find the other hosts is filled in. Or a function that returns the words for a Host. on:
        the numbers of hosts; those that were killed are left out by default. timeout, check: as
        for `HostsJob.wait`. options: those of `start`.
        """
        return self.start(command, on, **options).wait(timeout, check)

    def start(self, command: Command, on: int | Sequence[int] | None = None, *,
              folder: str = ".", environment: dict[str, str] | None = None,
              quiet: bool = False) -> HostsJob:
        """Starts a command as `run` does and returns at once. folder: where it runs. environment:
        variables in addition to those of this process. quiet: show nothing of what it prints."""
        self._raise_if_closed()
        chosen = self._chosen(on)
        number = next(self._numbers)
        commands, processes = {}, {}
        for place, host in enumerate(chosen):
            words = list(command(host) if callable(command) else command)
            # `place`: the number among the hosts of this job, not among all; host 0 may have been
            # killed.
            if torchrun.is_torchrun(words):
                words = torchrun.torchrun(words, place, [h.address for h in chosen], number)
            commands[host.index] = words
        try:
            for host in chosen:
                line = self._namespaces.command(host.process,
                                                contained(commands[host.index], folder))
                processes[host.index] = start_process(line, folder, _environment(environment))
            job = HostsJob(processes, commands, self.bytes, self._is_alive, quiet)
        except BaseException:
            for process in processes.values():
                process.kill()
            raise
        self._jobs.append(job)
        return job

    def bytes(self) -> list[LinkBytes]:
        """What passed the link of each host since the with-block began, as the kernel counts it.
        The counters of a host that was killed stay as they were then."""
        return [host.bytes() for host in self._hosts]

    @contextlib.contextmanager
    def count_bytes(self) -> Iterator[list[LinkBytes]]:
        """Yields a list that, at the end of the block, has what passed each host's link in it."""
        before, counted_bytes = self.bytes(), []
        yield counted_bytes
        counted_bytes += [now - then for now, then in zip(self.bytes(), before, strict=True)]

    def _chosen(self, on) -> "list[Host]":
        if on is None:
            return [host for host in self._hosts if host.alive]
        numbers = [on] if isinstance(on, int) else list(on)
        for number in numbers:
            if number not in range(len(self)):
                raise ValueError(f"there is no host {number}: they are numbered from 0 to "
                                 f"{len(self) - 1}")
            self[number].raise_if_killed()
        return [self[number] for number in numbers]

    def _is_alive(self, index) -> bool:
        return self._hosts[index].alive

    def _raise_if_closed(self):
        if self._namespaces is None:
            raise LaunchError(f"these {counted(len(self), 'host')} exist only inside the block of "
                              "`with hosts(...)`")


class Host:
    """One of the hosts. address: its IPv4 address, which no other machine can reach. process: the
    first one on it. alive: False after `kill`."""

    def __init__(self, index: int, address: str, namespaces: Namespaces):
        self.index, self.address = index, address
        self.process: psutil.Process = namespaces.hosts[index]
        self.alive = True
        self._namespaces = namespaces
        self._last_bytes = LinkBytes()

    def __repr__(self):
        return f"<host {self.index}, {self.address}{'' if self.alive else ', killed'}>"

    def bytes(self) -> LinkBytes:
        """What passed its link so far."""
        if self.alive:
            with contextlib.suppress(OSError):
                self._last_bytes = link_bytes(self.process.pid)
        return self._last_bytes

    def unplug(self) -> None:
        """Pulls its cable: what it sends is lost, and nothing reaches it. Nobody is told."""
        self._set_port("down")

    def plug(self) -> None:
        """Puts its cable back; TCP then sends again what was lost."""
        self._set_port("up")

    def kill(self) -> None:
        """Takes its power away: every process on it ends at once, and sends nothing any more, not
        even that its connections are closed."""
        # Before its processes end: the kernel would send FIN or RST for their connections.
        self.unplug()
        # The counters are gone with the host's network namespace: the last values are read now.
        self.bytes()
        self.alive = False
        self.process.kill()
        psutil.wait_procs([self.process], timeout=10)

    def raise_if_killed(self) -> None:
        if not self.alive:
            raise LaunchError(f"host {self.index} was killed")

    def _set_port(self, state):
        self.raise_if_killed()
        self._namespaces.run_on_machine("ip", "link", "set", f"port{self.index}", state)


def _environment(more) -> dict[str, str]:
    """The variables of a job."""
    folder = os.path.dirname(sys.executable)
    return {"OMP_NUM_THREADS": "1",  # torchrun would set it too, with a warning on each host
            **os.environ,
            # `python` is this Python, and it prints each line when it is complete.
            "PATH": os.pathsep.join([folder, PATH]), "PYTHONUNBUFFERED": "1",
            "GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0",
            "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": torchrun.LINE_PREFIX,
            **(more or {})}
