"""A Slurm with two nodes on this machine, unpacked from Debian's packages into a folder: nothing is
installed, and no service, no account and no key is needed. It listens on 127.0.0.1 alone, because
with `auth/none` whoever reaches it may run a job."""

import contextlib
import getpass
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

PACKAGES = ["slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "libhwloc15"]
ROOT = Path(__file__).resolve().parents[1]
STARTING, JOB = 30.0, 120.0  # seconds
# Two slurmd on one machine need a port and a name each, given by -N; proctrack/linuxproc and
# task/none need neither cgroups nor root. StateSaveLocation and the like must exist before.
CONFIGURATION = """\
ClusterName=workbook
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
AuthType=auth/none
CredType=cred/none
SlurmUser={user}
SlurmdUser={user}
PluginDir={plugins}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=3
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1
NodeName={host}-b NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1
PartitionName=main Nodes={host},{host}-b Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """A running Slurm. Its first node has this machine's name, by which a rank finds it."""

    def __init__(self, folder: Path):
        self.folder, self.unpacked = folder, folder / "unpacked"
        self.host, self.ports = socket.gethostname().split(".")[0], free_ports(4)
        plugins = next(self.unpacked.glob("usr/lib/*/slurm-wlm"))
        for name in ("state", f"spool-{self.host}", f"spool-{self.host}-b"):
            (folder / name).mkdir()
        conf = folder / "slurm.conf"
        conf.write_text(CONFIGURATION.format(host=self.host, ports=self.ports, folder=folder,
                                             plugins=plugins, user=getpass.getuser()))
        self.environment = {
            **os.environ, "SLURM_CONF": str(conf),
            "LD_LIBRARY_PATH": f"{plugins}:{plugins.parent}",
            "PATH": f"{self.unpacked}/usr/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def __enter__(self):
        step = self.unpacked / "usr/sbin/slurmstepd-wlm"
        try:
            self._daemon("slurmctld-wlm")
            for node in (self.host, f"{self.host}-b"):
                self._daemon("slurmd-wlm", "-d", step, "-N", node)
            deadline = time.monotonic() + STARTING
            while self.call("sinfo", "-h", "-o", "%T %D") != "idle 2":
                assert time.monotonic() < deadline, self.logs()
                time.sleep(0.2)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        with contextlib.suppress(subprocess.SubprocessError):
            self.call("scancel", "--quiet", "--full", "--user", getpass.getuser())
            deadline = time.monotonic() + 10  # what runs in a job is ended by Slurm itself
            while self.call("squeue", "-h") and time.monotonic() < deadline:
                time.sleep(0.2)
        for sign in (signal.SIGTERM, signal.SIGKILL):
            for process in self.processes():
                with contextlib.suppress(psutil.Error):
                    process.send_signal(sign)
            psutil.wait_procs(self.processes(), timeout=3)

    def _daemon(self, name, *arguments):
        # setpriv: it gets a signal when the test's process is killed
        command = ["setpriv", "--pdeathsig", "TERM", self.unpacked / "usr/sbin" / name, "-D"]
        subprocess.Popen([*command, *arguments], env=self.environment, stdin=subprocess.DEVNULL,
                         stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def call(self, *words: str, **environment: str) -> str:
        """What one of Slurm's commands prints; raises CalledProcessError."""
        done = subprocess.run(words, env=self.environment | environment, cwd=self.folder, text=True,
                              capture_output=True, timeout=30)
        if done.returncode and words[0] != "sinfo":  # which may come too early
            raise subprocess.CalledProcessError(done.returncode, words, done.stdout, done.stderr)
        return done.stdout.strip()

    def submit(self, *words: str, **environment: str) -> str:
        """Submits with sbatch; returns the job's number."""
        return re.search(r"\d+", self.call("sbatch", *words, **environment))[0]

    def wait(self, job: str) -> str:
        """Waits for a job's end and returns its state, such as COMPLETED."""
        deadline = time.monotonic() + JOB
        while True:
            state = re.search(r"JobState=(\w+)", self.call("scontrol", "show", "job", job))[1]
            if state not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"):
                return state
            assert time.monotonic() < deadline, f"the job is still {state}\n{self.logs()}"
            time.sleep(0.3)

    def name_resolves(self) -> bool:
        """Whether a rank finds the first node by its name; in some containers it does not."""
        with contextlib.suppress(OSError):
            return bool(socket.gethostbyname(self.host))
        return False

    def processes(self) -> list[psutil.Process]:
        """All processes of this Slurm and of its jobs: its programs, of which slurmstepd clears its
        environment, and those with its configuration."""
        return [process for process in psutil.process_iter() if process.pid != os.getpid()
                and (_program(process).startswith(f"{self.unpacked}/") or
                     _variable(process, "SLURM_CONF") == self.environment["SLURM_CONF"])]

    def listening(self) -> set[str]:
        """The addresses at which its daemons listen."""
        daemons = [one for one in self.processes() if one.name().startswith("slurm")]
        return {found.laddr.ip for one in daemons for found in one.net_connections("inet")
                if found.status == psutil.CONN_LISTEN}

    def logs(self) -> str:
        """The ends of its logs, for a test that fails."""
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}"
                         for path in sorted(self.folder.glob("*.log")))


def _variable(process, name) -> str | None:
    with contextlib.suppress(psutil.Error, OSError):
        return process.environ().get(name)
    return None


def _program(process) -> str:
    with contextlib.suppress(psutil.Error, OSError):
        return process.exe()
    return ""


def free_ports(number: int) -> list[int]:
    """Different free ports of this machine."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def unpack(folder: Path) -> Path:
    """Downloads the packages (3.3 MB) and unpacks them; skips the test where that cannot be."""
    with contextlib.suppress(OSError):
        if "VERSION_CODENAME=bookworm" not in Path("/etc/os-release").read_text():
            pytest.skip("needs Debian 12, whose packages of Slurm are unpacked")
    downloads = folder / "packages"
    downloads.mkdir()
    try:
        done = subprocess.run(["apt-get", "download", "-q", *PACKAGES], cwd=downloads, text=True,
                              capture_output=True, timeout=120)
        why = done.stderr.strip().splitlines()[-1:] if done.returncode else []
    except (OSError, subprocess.SubprocessError) as error:
        why = [str(error)]
    if why:
        pytest.skip(f"Slurm's packages are not to be had from apt: {why[0]}")
    for package in downloads.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package, folder / "unpacked"], check=True, timeout=60)
    return folder
