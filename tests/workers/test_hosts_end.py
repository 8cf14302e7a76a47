"""What hosts leave behind: nothing, however their caller ends; an ordinary user's hosts; and why a
machine refuses them."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import leaks
import psutil
import pytest

from labs.workers.hosts import hosts, hosts_unavailable, namespaces

ROOT = Path(__file__).resolve().parents[2]

# A caller with a job on each host, and a child of its own that outlives it.
CALLER = """
import os, signal, sys, time
from labs.workers.hosts import hosts
with hosts(2, bandwidth="200mbit") as pair:
    job = pair.start(["sh", "-c", "setsid sleep 1000 & sleep 1000"])
    if os.fork() == 0:
        time.sleep(30)
        os._exit(0)
    print("ready", flush=True)
    %s
"""

ORDINARY = """
import os
from labs.workers.hosts import hosts, hosts_unavailable
assert os.getuid() == %d and not hosts_unavailable()
with hosts(2, bandwidth="200mbit", latency="1ms") as pair:
    with pair.count_bytes() as wire:
        done = pair.run(lambda host: ["python", "-I", "-S", "-c", (
            "import socket; socket.create_server(('10.0.0.2', 5000)).accept()" if host.index else
            "import socket, time\\n"
            "while socket.socket().connect_ex(('10.0.0.2', 5000)): time.sleep(0.05)")])
    assert wire[0].sent > 0
    pair[0].unplug()
    pair[0].plug()
    pair[1].kill()
print("done")
"""
USER = 61_234  # nobody's


def below(process) -> set:
    """Every process below a caller, except the child that it forked, and those it waits for."""
    return {child for child in process.children(recursive=True) if child.cmdline()
            and child.cmdline() != process.cmdline()}


def sleeping(caller) -> list:
    """What the jobs have started so far."""
    return [one for one in psutil.Process(caller).children(recursive=True)
            if one.cmdline() == ["sleep", "1000"]]


def networks(processes) -> set[str]:
    """The network namespaces of processes."""
    return {os.readlink(f"/proc/{process.pid}/ns/net") for process in processes}


def networks_in_use() -> set[str]:
    found = set()
    for number in psutil.pids():
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/{number}/ns/net"))
    return found


def gone(process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
@pytest.mark.usefixtures("needs_hosts")
@pytest.mark.parametrize(("then", "number"), [
    ("time.sleep(60)", signal.SIGKILL),
    ("job.wait()", signal.SIGINT),
    ("sys.stdin.readline(); raise ValueError", None)], ids=["kill -9", "interrupt", "exception"])
def test_nothing_is_left_however_the_caller_ends(then, number):
    own, mounts = os.readlink("/proc/self/ns/net"), Path("/proc/self/mounts").read_text()
    caller = subprocess.Popen([sys.executable, "-c", CALLER % (
        then)], cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        start_new_session=True)
    try:
        assert caller.stdout.readline() == "ready\n"
        assert leaks.until(lambda: len(sleeping(caller.pid)) == 4)
        started = below(psutil.Process(caller.pid))
        theirs = networks(started) - {own}
        assert len(theirs) == 3  # two hosts and the switch
        if number:
            caller.send_signal(number)
        caller.stdin.write("\n")
        caller.stdin.close()
        assert caller.wait(20) != 0
        assert leaks.until(lambda: all(map(gone, started)), 10)
        assert leaks.until(lambda: not theirs & networks_in_use(), 10)
        # Addresses, links and mounts were never outside.
        assert Path("/proc/self/mounts").read_text() == mounts
        assert not {"switch", "port0", "port1"} & set(os.listdir("/sys/class/net"))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(caller.pid, signal.SIGKILL)  # the child that it forked, too
        caller.stdout.close()


def readable_copy(folder) -> str:
    """Commands of a shell, in a mount namespace of its own, after which an ordinary user can read
    this checkout and this Python, also below a home of root's: only there, and nothing else."""
    needed = {str(ROOT), sys.prefix, sys.base_prefix}
    needed = [path for path in sorted(needed)
              if not any(path.startswith(f"{other}/") for other in needed)]
    closed = {path: top for path in needed for top in [closed_folder(path)] if top}
    lines = [f"mkdir -p {folder}/{n} && mount --rbind {path} {folder}/{n}"
             for n, path in enumerate(closed)]
    lines += [f"mount -t tmpfs -o mode=755 none {top}" for top in sorted(set(closed.values()))]
    lines += [f"mkdir -p {path} && mount --rbind {folder}/{n} {path}"
              for n, path in enumerate(closed)]
    return "\n".join(lines)


def closed_folder(path) -> Path | None:
    """The first folder on the way to a path that others may not enter."""
    return next((above for above in reversed([Path(path), *Path(path).parents])
                 if not above.stat().st_mode & 0o001), None)


@pytest.mark.usefixtures("needs_hosts")
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user; as an ordinary "
                    "user every other test here shows what this one does")
def test_an_ordinary_user_can_have_hosts():
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        become = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups",
                  "--inh-caps=-all", "--bounding-set=-all"]
        # Where the administrator forbids it, the sentence says so; nothing of ours can be tested.
        if subprocess.run([*become, "unshare", "--user", "--map-root-user", "true"]).returncode:
            pytest.skip("this machine gives ordinary users no user namespaces")
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": "/",
                       "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-ec", f'{readable_copy(folder)}\ncd /\nexec "$@"', "sh",
             *become, sys.executable, "-c", ORDINARY % USER],
            env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.endswith("done\n"), done.stderr


def test_another_system_is_refused(monkeypatch):
    monkeypatch.setattr(namespaces.sys, "platform", "darwin")
    assert "Only Linux has network namespaces" in hosts_unavailable()
    with pytest.raises(namespaces.HostsUnavailable), hosts(2):
        pass


def test_missing_programs_are_named_with_their_package(monkeypatch):
    monkeypatch.setattr(namespaces.shutil, "which",
                        lambda name, path: None if name in ("ip", "tc") else name)
    assert hosts_unavailable() == ("The hosts need ip and tc, not installed here: "
                                   "sudo apt-get install iproute2.")


def test_a_refusal_is_explained(monkeypatch, tmp_path):
    refuse = tmp_path / "unshare"
    refuse.write_text("#!/bin/sh\necho 'unshare: unshare failed: Operation not permitted' >&2\n"
                      "exit 1\n")
    refuse.chmod(0o755)
    for name in ("ip", "tc", "nsenter", "setpriv", "mount"):
        (tmp_path / name).symlink_to(shutil.which("true"))
    monkeypatch.setattr(namespaces, "PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    before = psutil.Process().children()
    assert hosts_unavailable().startswith("This machine refuses network namespaces (unshare: "
                                          "unshare failed: Operation not permitted): ")
    assert psutil.Process().children() == before


@pytest.mark.parametrize(("setting", "value", "advice"), [
    ("kernel.apparmor_restrict_unprivileged_userns", "1",
     "sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0"),
    ("kernel.unprivileged_userns_clone", "0", "sudo sysctl kernel.unprivileged_userns_clone=1"),
    ("user.max_user_namespaces", "0", "sudo sysctl user.max_user_namespaces=10000")])
def test_the_setting_that_forbids_it_is_named(monkeypatch, setting, value, advice):
    monkeypatch.setattr(namespaces, "_setting", lambda name: value if name == setting else "")
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    assert advice in namespaces.explain("unshare: write failed /proc/self/uid_map: not permitted")


def test_a_kernel_without_tbf_is_named():
    assert "CONFIG_NET_SCH_TBF" in namespaces.explain("tc: Error: Specified qdisc kind is unknown.")
