"""A class on one machine: two students, each a user with a server of their own, one copy of the
workbook that neither may write to, one folder for temporary files."""

import ast
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import leaks
import notebook_kernel
import psutil
import pytest

client = pytest.importorskip("jupyter_client.blocking.client")
requests = pytest.importorskip("requests")

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("ada", "emmy")
# Python may lie below a home that others may not read, as in a container: reading is all they may.
READS = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search", "--bounding-set=+all"]
# Each waits on a rank until the other's ranks run too.
LAUNCH = """\
import os, pathlib, tempfile, time
import labs
from labs.fsdp_profiling import recorded_runs
from labs.meters import trace_file
from labs.workers import processes

def work():
    import torch
    me, both = "%(name)s", ("ada", "emmy")
    pathlib.Path("%(shared)s", me).touch()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not all(
            os.path.exists(f"%(shared)s/{name}") for name in both):
        time.sleep(0.05)
    total = torch.tensor([float(os.getuid())])
    torch.distributed.all_reduce(total)
    return total.item(), torch.get_num_threads(), len(os.listdir("%(shared)s"))

found = {"ranks": list(labs.launch(work, ranks=2, quiet=True)), "uid": os.getuid(),
         "private": processes.private_directory(),
         "traces": str(trace_file.experiments_folder() / recorded_runs.FOLDER),
         "may write": os.access(trace_file.WORKBOOK, os.W_OK)}
"""


class Student:
    """A Jupyter server of one student, as a hub starts it: scripts/cloud/single-user."""

    def __init__(self, name: str, uid: int | None, folder: Path):
        self.name, self.uid, self.home = name, uid, folder / name
        self.home.mkdir(mode=0o700)
        self.shared, self.temporary = folder / "shared", folder / "tmp"
        programs = folder / "programs"  # a JupyterHub's server is this one and its authentication
        programs.mkdir(exist_ok=True)
        (programs / "jupyterhub-singleuser").write_text(
            f'#!/bin/sh\nexec "{sys.executable}" -m jupyter_server "$@"\n')
        (programs / "jupyterhub-singleuser").chmod(0o755)
        environment = {
            **os.environ, "HOME": str(self.home), "TMPDIR": str(self.temporary), "CPU_LIMIT": "2",
            "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "USER": name,
            "JUPYTER_RUNTIME_DIR": str(self.home / "runtime")}
        environment.pop("PYTEST_CURRENT_TEST", None)
        command = [ROOT / "scripts" / "cloud" / "single-user", "--ServerApp.port=0",
                   "--no-browser", "--allow-root"]
        if uid is not None:
            os.chown(self.home, uid, uid)
            command = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", *READS,
                       *command]
        self.log = open(folder / f"{name}.log", "wb")
        self.client = None
        self.process = subprocess.Popen(command, env=environment, cwd=self.home,
                                        stdout=self.log, stderr=self.log, start_new_session=True)

    def start_kernel(self):
        """Of a notebook in ~/workbook/work, as JupyterLab asks for it."""
        runtime = self.home / "runtime"
        assert leaks.until(self.server, 60), self.said()
        server = self.server()
        self.api, self.token = f"{server['url']}api/kernels", {"token": server["token"]}
        assert leaks.until(self.answers, 30), self.said()
        self.kernel = requests.post(self.api, params=self.token, timeout=30, json={
            "name": "python3", "path": "work/05_fsdp_profiling.ipynb"}).json()["id"]
        self.client = client.BlockingKernelClient()
        self.client.load_connection_file(str(runtime / f"kernel-{self.kernel}.json"))
        self.client.start_channels(iopub=False, stdin=False, hb=False)

    def server(self) -> dict | None:
        """What it says of itself; None before its file is there, and while it is written."""
        with contextlib.suppress(StopIteration, ValueError):
            return json.loads(next((self.home / "runtime").glob("jpserver-*.json")).read_text())
        return None

    def answers(self) -> bool:
        with contextlib.suppress(requests.ConnectionError):
            return requests.get(self.api, params=self.token, timeout=30).ok
        return False

    def begin(self):
        self.client.execute(LAUNCH % {"name": self.name, "shared": self.shared},
                            user_expressions={"found": "found"})

    def found(self) -> dict:
        """What the cell found."""
        content = self.client.get_shell_msg(timeout=120)["content"]
        assert content["status"] == "ok", (content, self.said())
        return ast.literal_eval(content["user_expressions"]["found"]["data"]["text/plain"])

    def said(self):
        return Path(self.log.name).read_text()

    def close(self) -> list:
        """Ends the server as a hub does; the processes of it that are left."""
        below = psutil.Process(self.process.pid).children(recursive=True)
        notebook_kernel.disconnect(self.client)
        requests.delete(f"{self.api}/{self.kernel}", params=self.token, timeout=30)
        self.process.terminate()
        self.process.wait(20)
        self.log.close()
        leaks.until(lambda: all(map(gone, below)), 10)
        return [child for child in below if not gone(child)]

    def kill(self):
        """Ends what is left, unless `close` has: the server's session, and each kernel's."""
        self.log.close()
        if self.client:
            notebook_kernel.disconnect(self.client)
        if self.process.returncode is not None:
            return  # its number may be another's by now
        for one in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(20)


def gone(process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.fixture
def students():
    """Two of them; as two users where this is root, who alone can become one."""
    folder = Path("/tmp") / f"class-{os.getpid()}"
    users = os.getuid() == 0 and shutil.which("setpriv")
    with contextlib.ExitStack() as stack:  # also of what was started before something failed
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        for name in ("", "shared", "tmp"):
            (folder / name).mkdir()
            # as /tmp is: all may write, none may touch what is another's
            (folder / name).chmod(0o1777)
        found = []
        for number, name in enumerate(NAMES):
            found.append(Student(name, 61_000 + number if users else None, folder))
            stack.callback(found[-1].kill)
        yield found


@pytest.mark.slow
def test_two_students_launch_at_the_same_time(students):
    before = leaks.shared_memory()
    for student in students:
        student.start_kernel()
    for student in students:
        student.begin()
    found = [student.found() for student in students]

    for student, own in zip(students, found, strict=True):
        uid = student.uid if student.uid is not None else os.getuid()
        # both ranks: the sum over one's own ranks, one of the two cores, both students at work
        assert own["uid"] == uid and own["ranks"] == [(2 * uid, 1, 2)] * 2
        assert own["traces"] == str(student.home / "workbook/work/experiments/fsdp_profiling")
        assert own["private"].startswith(str(student.temporary))
        assert os.stat(own["private"]).st_mode & 0o777 == 0o700
        assert os.stat(own["private"]).st_uid == uid
        assert student.uid is None or not own["may write"]
        assert (student.home / "workbook/work/00_start_here.ipynb").is_file()
    assert len({own["private"] for own in found}) == 2

    assert [student.close() for student in students] == [[], []]
    temporary = students[0].temporary
    assert leaks.until(lambda: not leaks.temporary_files(temporary), 5), leaks.temporary_files(
        temporary)
    assert leaks.shared_memory() - before <= leaks.in_use_elsewhere(os.getpid())
