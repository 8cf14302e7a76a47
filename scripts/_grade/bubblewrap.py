"""The command lines of bubblewrap, which makes the walls around submissions.

There are two, one inside the other. The outer one is around the zygote: a small read-only tree, in
which a user without rights sees what root may see (a Python below /root, say), and a namespace of
processes, so that with its first one all others end. The inner one is
made for each submission's process: namespaces of its own for users, mounts, processes, network, IPC
and host name, the same tree without our scripts, and nothing of a capability. An interpreter that
has imported torch cannot be handed over by starting a program: a fork of the zygote joins the inner
namespaces (namespaces.run_isolated) while a shell holds them open.
"""

import json
import os
import shutil
import sys
from pathlib import Path

HOME = "/student"
COPIES = "/copies-of-labs"  # around the zygote: of labs, with some of its modules (reach)
INNER = 1000  # user and group inside
# Where a submission may write: each is an empty tmpfs, which hides what else lies there.
OWN_FOLDERS = (HOME, "/tmp", "/dev/shm")
INSTALL = "apt-get install bubblewrap (Debian, Ubuntu), or dnf install bubblewrap (Fedora)"
MISSING = f"""\
Submissions run in the sandbox of bubblewrap, and this machine has no bwrap. Install it:
{INSTALL}"""
READY = b"ready\n"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_FILES = {"passwd": "student:x:1000:1000::/student:/bin/sh\n", "group": "student:x:1000:\n",
          "hosts": "127.0.0.1 localhost\n", "nsswitch.conf": "hosts: files\n"}


def program() -> str:
    """The path of bwrap; empty where it is not installed."""
    return shutil.which("bwrap") or ""


def shown_paths(root: Path) -> list[str]:
    """What a submission needs of this machine: its Python with all packages, and labs."""
    found = {os.path.realpath(path) for path in (sys.prefix, sys.base_prefix, sys.exec_prefix)}
    found |= {sys.prefix, sys.base_prefix, str(root / "labs"),
              *(path for path in sys.path if path.endswith("-packages"))}
    kept = sorted(path for path in found if os.path.exists(path) and path not in ("/", "/usr"))
    return [path for path in kept if not any(path.startswith(other + "/") for other in kept)]


def hidden(shown: list[str]) -> str:
    """The first path that a submission needs and would not see; or empty."""
    return next((path for path in shown for own in OWN_FOLDERS
                 if f"{path}/".startswith(f"{own}/")), "")


def around_zygote(shown: list[str], info: int, copies: str = "") -> tuple[list[str], list[int]]:
    """(a command line to put before the zygote's, the descriptors that it uses: pass them on and
    close them). shown: paths to see, read-only. info: where it writes its first process's number.
    copies: a folder to see as COPIES.
    """
    command = [program(), "--unshare-pid", "--info-fd", str(info), *_tree(shown)]
    # bwrap covers parts of a new proc. The kernel lets the inner sandbox mount one of its own only
    # where it sees one that is not covered: the machine's, which submissions do not see.
    command += ["--proc", "/proc", "--bind", "/proc", "/proc-of-the-machine", *_folders("/etc")]
    if copies:
        command += ["--ro-bind", copies, COPIES]
    for path in ("/etc/ld.so.cache", "/etc/alternatives"):
        command += ["--ro-bind-try", path, path]
    descriptors = [info]
    for name, text in _FILES.items():
        reading, writing = os.pipe()
        os.write(writing, text.encode())
        os.close(writing)
        descriptors.append(reading)
        command += ["--perms", "0644", "--ro-bind-data", str(reading), f"/etc/{name}"]
    for path in OWN_FOLDERS:  # for what imports write: matplotlib a cache of fonts
        command += ["--perms", "1777", "--tmpfs", path]
    return [*command, "--remount-ro", "/", "--die-with-parent", "--chdir", "/", "--"], descriptors


def around_submission(shown: list[str], info: int, instead: tuple[str, str] | None = None
                      ) -> list[str]:
    """The command that makes a submission's namespaces, writes on the descriptor `info` which they
    are, says READY when they are complete, and keeps them until its input ends. instead: (a path
    of `shown`, the folder that is seen there)."""
    return [program(), "--unshare-all", "--unshare-user", "--uid", str(INNER), "--gid", str(INNER),
            "--cap-drop", "ALL", "--die-with-parent", "--new-session", "--hostname", "workbook",
            *_tree(shown), *(["--ro-bind", instead[1], instead[0]] if instead else ()),
            "--ro-bind", "/etc", "/etc", "--proc", "/proc",
            *(word for path in OWN_FOLDERS for word in _folders(path)), "--remount-ro", "/",
            "--chdir", "/", "--info-fd", str(info), "--", "/bin/sh", "-c", "echo ready; read end"]


def first_process(info: int) -> int:
    """A descriptor for the first process of new namespaces, of whose number bwrap has written on
    the pipe `info`, which is closed. Raises OSError where it wrote nothing."""
    with open(info, "rb") as file:
        said = file.read()
    if not said:
        raise OSError("bwrap has made no namespaces")
    return os.pidfd_open(json.loads(said)["child-pid"])


def _tree(shown):
    """The system, devices, and what is shown, all read-only; a link is made again as a link."""
    words = _folders("/dev")
    for name in _DEVICES:
        words += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        words += ["--symlink", f"/proc/self/fd{target}", f"/dev/{name}"]
    for path in [*_SYSTEM, *shown]:
        if os.path.islink(path):
            words += [*_folders(os.path.dirname(path)), "--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            words += [*_folders(os.path.dirname(path)), "--ro-bind", path, path]
    return words


def _folders(path):
    """Makes a folder and those above it, open to all: by itself bwrap makes them for their owner
    alone."""
    above = [str(each) for each in Path(path).parents if str(each) != "/"]
    return [word for each in [*reversed(above), path] if each != "/"
            for word in ("--perms", "0755", "--dir", each)]
