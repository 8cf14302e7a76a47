"""Starts and ends the namespaces of `machine`, and enters them. Says in one sentence why a machine
refuses them, and what to do about it."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil

from labs.words import listed
from labs.workers.launch_error import LaunchError

MACHINE = Path(__file__).with_name("machine.py")
PACKAGES = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux",
            "setpriv": "util-linux", "mount": "mount"}
# An ordinary user's PATH has no sbin on Debian, where `ip` and `tc` are.
PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
GONE_AFTER = 5.0  # seconds until what should have ended by itself is killed


class HostsUnavailable(LaunchError):
    """This machine cannot have hosts; the message says why, and what to do."""


class Namespaces:
    """The namespaces while they exist. pids[h]: the first process of host h, as seen from here."""

    def __init__(self, described: dict):
        raise_if_tools_are_missing()
        # As root without a user namespace: in one, root could not read other users' files.
        attempts = [[], ["--user", "--map-root-user"]][os.geteuid() != 0:]
        for user in attempts:
            self._enter_user = bool(user)
            self._process = _start(user, described)
            with _ended_on_error(self):
                if self._process.stdout.readline() == "ready\n":
                    break
            refusal = self._process.communicate()[1]
        else:
            raise HostsUnavailable(explain(refusal))
        with _ended_on_error(self):
            self.machine, = psutil.Process(self._process.pid).children()
            self.hosts = [self._find_host(index) for index in range(len(described["addresses"]))]

    def _find_host(self, index) -> psutil.Process:
        """The first process of a host, by what `machine` started it with."""
        mark = f'"name": "host{index}"'
        parent, = (child for child in self.machine.children() if mark in " ".join(child.cmdline()))
        return parent.children()[0]

    def command(self, process: psutil.Process, command: list[str], pid: bool = True) -> list[str]:
        """The command line that runs a command in the namespaces of a process."""
        # Credentials: an ordinary user may not change groups in a user namespace.
        user = ["--user", "--preserve-credentials"] if self._enter_user else []
        return ["nsenter", "--target", str(process.pid), *user, "--net", "--uts", "--mount",
                *(["--pid"] if pid else []), "--", *command]

    def run_on_machine(self, *command: str) -> None:
        """Runs a command where the switch is. Raises CalledProcessError when it fails."""
        subprocess.run(self.command(self.machine, list(command)), check=True, capture_output=True,
                       env={**os.environ, "PATH": PATH}, stdin=subprocess.DEVNULL)

    def end(self) -> None:
        """Ends everything in the namespaces; nothing is left when it returns."""
        with contextlib.suppress(BrokenPipeError):  # it has ended
            # To close the pipe is not enough where a forked child keeps a copy of it.
            self._process.stdin.write("end\n")
            self._process.stdin.close()
        try:
            self._process.wait(GONE_AFTER)
        except subprocess.TimeoutExpired:
            self._process.kill()  # takes its child along, and that one everything else
            self._process.wait()
        finally:
            self._process.stdout.close()
            self._process.stderr.close()


@contextlib.contextmanager
def _ended_on_error(namespaces):
    try:
        yield
    except BaseException:
        namespaces.end()
        raise


def _start(user, described) -> subprocess.Popen:
    caller = os.pidfd_open(os.getpid())
    try:
        return subprocess.Popen(
            ["unshare", *user, "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child",
             "--mount-proc", sys.executable, "-I", "-S", str(MACHINE),
             json.dumps({**described, "caller": caller})],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            pass_fds=[caller], env={**os.environ, "PATH": PATH},
            start_new_session=True)  # Ctrl-C in a terminal is for the caller alone
    finally:
        os.close(caller)


def raise_if_tools_are_missing() -> None:
    """Raises HostsUnavailable on anything but Linux, or where a program is not installed."""
    if not sys.platform.startswith("linux"):
        raise HostsUnavailable("Only Linux has network namespaces, which the hosts are made of: "
                               "use a Linux machine, a virtual machine or a container started "
                               "with --privileged.")
    missing = [tool for tool in PACKAGES if shutil.which(tool, path=PATH) is None]
    if missing:
        packages = dict.fromkeys(PACKAGES[tool] for tool in missing)
        raise HostsUnavailable(f"The hosts need {listed(missing)}, not installed here: "
                               f"sudo apt-get install {' '.join(packages)}.")


def explain(refusal: str) -> str:
    """Why the machine refused, by what the failed command printed, and what to do."""
    refusal = (refusal.strip().splitlines() or ["no reason given"])[0]
    return f"This machine refuses network namespaces ({refusal}): {_advice(refusal)}."


def _advice(refusal) -> str:
    for setting, value in {"kernel.apparmor_restrict_unprivileged_userns": "0",
                           "kernel.unprivileged_userns_clone": "1"}.items():
        if _setting(setting) == str(1 - int(value)) and os.geteuid() != 0:
            return f"allow them by sudo sysctl {setting}={value}"
    if _setting("user.max_user_namespaces") == "0":
        return "allow them by sudo sysctl user.max_user_namespaces=10000"
    if "qdisc kind is unknown" in refusal:
        return "its kernel was built without tbf (CONFIG_NET_SCH_TBF), which limits bandwidth"
    if any(Path(mark).exists() for mark in ("/.dockerenv", "/run/.containerenv")):
        return "start the container with --privileged"
    return "an administrator has to allow user namespaces, or root has to run this"


def _setting(name) -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys", *name.split(".")).read_text().strip()
    return ""
