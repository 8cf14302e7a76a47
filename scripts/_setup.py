"""Make or renew .venv: torch first and alone, the rest under the lock, then this package.

Runs before anything is installed, perhaps on a Python so old that it can only be turned away in
a sentence: hence the standard library alone, and no syntax newer than Python 3.6.
"""

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import _uv  # noqa: E402
from _checkout import Checkout, read, write  # noqa: E402
from _pip import drop_half_installed, ensure_pip, pip, report, step  # noqa: E402
from _pythons import (  # noqa: E402
    OLDEST,
    choose_base,
    dotted,
    is_supported_torch,
    minor_version,
    probe,
    public_version,
    rejecting_pin,
)
from _setup_errors import SetupError, pin_rejects_python, venv_failed  # noqa: E402

try:
    import fcntl
except ImportError:  # Windows outside WSL
    fcntl = None

FORMAT = "2"  # raise it when set-up itself changes what it installs
# Measured in November 2026 on 2 cores: the wheels for Linux and Python 3.11 (386 MB in all), and
# the time without their download (25 s by uv, and 88 s by pip, when nothing else ran).
TORCH_MB, REST_MB, UV_MB = 190, 200, 25  # uv's are among the rest's
ALL_MINUTES, REST_MINUTES = "half a minute", "20 s"
CPU_GB, CUDA_GB, RENEW_GB = 2.5, 8.0, 1.0  # of disk: a new .venv with either torch, a renewal


def digest(checkout):
    """Return a hash of everything that decides what .venv should hold."""
    parts = [FORMAT, checkout.root, read(checkout.lock), read(checkout.project)]
    parts.append(read(os.path.join(checkout.venv, "pyvenv.cfg")))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def is_current(checkout):
    """Return whether .venv holds what the lock says, without starting a process."""
    return os.path.exists(checkout.python) and read(checkout.stamp) == digest(checkout)


@contextlib.contextmanager
def exclusive(checkout):
    """Let one set-up at a time into a checkout; yield the lock's file descriptor."""
    try:
        file = open(os.path.join(checkout.root, ".setup.lock"), "a")
    except OSError as error:
        raise SetupError(
            f"Set-up cannot write in {checkout.root} ({error.strerror}): copy the workbook to a "
            "folder of your own, or fix the folder's permissions."
        ) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            report("another set-up is running, waiting ...")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def is_usable(checkout):
    """Return whether the .venv that is there can be built on; refuse one of an unfit Python."""
    found = probe(checkout.python)
    if found is None or os.path.exists(checkout.base_python):
        return False
    version = found["version"]
    if tuple(version) < OLDEST:
        raise SetupError(
            f"{checkout.venv} was made with Python {minor_version(version)}, and the workbook "
            f"needs {minor_version(OLDEST)} or newer: remove that folder and run this again."
        )
    pin = rejecting_pin(checkout.pins(), version)
    if pin:
        python = os.path.realpath(checkout.python)
        raise SetupError(pin_rejects_python(python, dotted(version), pin, checkout.venv))
    return ensure_pip(checkout)


def remembered_base(checkout):
    """Return {'PYTHON': the one whose torch .venv stood on}, or {} if there is none."""
    path = read(checkout.base_python).strip()
    return {"PYTHON": path} if path and probe(path) else {}


def unused_python(checkout):
    """Return a sentence if the environment names another Python than .venv was made with, or ''."""
    wanted = os.environ.get("PYTHON")
    if not wanted:
        return ""
    names = [real_executable(python) for python in (wanted, checkout.python)]
    if names[0] == names[1]:
        return ""
    return (
        f"PYTHON={wanted} is not used: .venv is already here, made with {names[1]}. Remove the "
        f"folder {checkout.venv} to have it made again."
    )


def report_unused_python(checkout):
    """Say so where PYTHON, which chooses the Python of a new .venv, changes nothing."""
    sentence = unused_python(checkout)
    if sentence:
        report(sentence)


def real_executable(python):
    """Return the path of the Python that runs under a name, links followed; None if none does."""
    code = "import os, sys; print(os.path.realpath(sys.executable))"
    try:
        printed = subprocess.check_output([python, "-c", code], stderr=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    return printed.decode().strip()


def find_base(checkout):
    """Return what `probe` says of the Python to make .venv with, which runs every pin."""
    return choose_base(dict(remembered_base(checkout), **os.environ), checkout.pins())


def make_venv(checkout, base):
    """Make .venv again, on top of the base Python's packages if they hold a supported torch."""
    keeps_torch = is_supported_torch(base["torch"]) and not base["in_venv"]
    check_disk(checkout.root, RENEW_GB if keeps_torch else None)
    with step(1, f"making .venv with Python {dotted(base['version'])}"):
        options = ["--clear"] + (["--system-site-packages"] if keeps_torch else [])
        command = [base["path"], "-P", "-m", "venv"] + options + [checkout.venv]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if done.returncode:
            printed = done.stdout.decode(errors="replace").strip() or "nothing"
            raise SetupError(venv_failed(base["path"], printed.splitlines()[-1]))
    if keeps_torch:
        write(checkout.base_python, base["path"] + "\n")


def check_disk(folder, needed=None):
    """Raise a sentence if the disk is too full; `needed` in GB, by default for a new .venv."""
    has_driver = os.path.exists("/proc/driver/nvidia/version")
    needed = needed or (CUDA_GB if has_driver else CPU_GB)
    free = shutil.disk_usage(folder).free / 1e9
    if free < needed:
        raise SetupError(
            f"Too little disk: set-up needs about {needed:.1f} GB and {folder} has {free:.1f} GB "
            "free: make room, or clone the workbook onto a larger disk."
        )


def torch_to_keep(checkout, found):
    """Return the version of torch in .venv that set-up must leave alone, or None."""
    own = (checkout.torch_version(), read(checkout.own_torch).strip())
    return found if is_supported_torch(found) and public_version(found) not in own else None


def write_requirements(checkout, torch):
    """Write the lock without torch, and a line with this torch; return both paths."""
    pins = [f"{pin.requirement} ; {pin.marker}".rstrip(" ;") for pin in checkout.pins()]
    rest = [pin for pin in pins if not pin.startswith("torch==")]
    paths = [os.path.join(checkout.venv, name) for name in ("rest.txt", "torch.txt")]
    write(paths[0], "\n".join(rest) + "\n")
    write(paths[1], f"torch=={torch}\n")
    return paths


def install_torch(checkout, lock_fd, found, rest):
    """Step 2: install the pinned torch, unless a fitting one is there to be kept."""
    pin = checkout.torch_version()
    if torch_to_keep(checkout, found) or os.path.exists(checkout.base_python):
        report(f"2/4 keeping torch {found}, which is already here (the lock names {pin})")
        return
    if public_version(found) != pin:
        write(checkout.own_torch, pin + "\n")
    there = "already here" if public_version(found) == pin else f"about {TORCH_MB} MB without CUDA"
    first = f"uv, which installs (about {UV_MB} MB), then " if _uv.is_missing(checkout) else ""
    with step(2, f"{first}torch {pin} ({there})"):
        pip(checkout, lock_fd, f"torch {pin}", "-c", rest, f"torch=={pin}")


def install_rest(checkout, lock_fd, rest, torch):
    """Step 3: everything else in the lock, held to the torch that is there."""
    arguments = ["-c", torch, "-r", rest]
    if os.path.exists(checkout.base_python):
        # JupyterLab finds its own files only where it is installed, so what the base has of
        # the lock is installed again; its torch, and what that needs, is not touched.
        arguments += ["--no-deps", "--ignore-installed"]
    number = len(checkout.pins()) - 1
    with step(3, f"JupyterLab, transformers and the rest: {number} packages, about {REST_MB} MB"):
        pip(checkout, lock_fd, "the locked packages", *arguments)
        write_jupyterlab_settings(checkout)
        write_kernel_settings(checkout)


def write_jupyterlab_settings(checkout):
    """Set JupyterLab's defaults in this .venv only.

    It does not ask each student about its news. It saves the state of sliders with the notebook:
    without it, a notebook that is opened again shows errors in their place.
    """
    folder = os.path.join(checkout.venv, "share", "jupyter", "lab", "settings")
    os.makedirs(folder, exist_ok=True)
    settings = {"@jupyterlab/apputils-extension:notification": {"fetchNews": "false"},
                "@jupyter-widgets/jupyterlab-manager:plugin": {"saveState": True}}
    write(os.path.join(folder, "overrides.json"), json.dumps(settings) + "\n")


def write_kernel_settings(checkout):
    """Load the extension that explains a NameError into each kernel of this .venv."""
    folder = os.path.join(checkout.venv, "etc", "ipython")
    os.makedirs(folder, exist_ok=True)
    write(os.path.join(folder, "ipython_kernel_config.py"),
          'get_config().InteractiveShellApp.extensions.append("labs.missing_names")\n')


def announce(checkout, torch):
    """Report, before anything is downloaded, how large the download is and how long all takes.

    torch: the version that is already here, or None.
    """
    keeps_torch = public_version(torch) == checkout.torch_version()
    if keeps_torch or torch_to_keep(checkout, torch):
        megabytes, minutes, cuda = REST_MB, REST_MINUTES, ""
    else:
        megabytes, minutes, cuda = TORCH_MB + REST_MB, ALL_MINUTES, "; with CUDA several GB"
    report(
        f"It downloads about {megabytes} MB ({megabytes * 8 // 100} s at "
        f"100 Mbit/s{cuda}) and takes about {minutes} more on 2 cores."
    )


def prepare_venv(checkout):
    """Step 1: make .venv, or keep the one that is there; return its torch's version or None."""
    if is_usable(checkout):
        report_unused_python(checkout)
        found = probe(checkout.python)
        announce(checkout, found["torch"])
        drop_half_installed(checkout)
        check_disk(checkout.root, RENEW_GB if found["torch"] else None)
        report(f"1/4 using .venv as it is (Python {dotted(found['version'])})")
    else:
        base = find_base(checkout)
        announce(checkout, None if base["in_venv"] else base["torch"])
        make_venv(checkout, base)
    write(checkout.log, "")
    return probe(checkout.python)["torch"]


def install(checkout, lock_fd):
    """Bring .venv to what the lock says; the stamp is written last."""
    start = time.monotonic()
    # Before anything that takes time: to start each Python of a busy machine can take a minute.
    report("Set-up runs once. It looks for a fitting Python here ...")
    checkout.torch_version()
    if os.path.exists(checkout.stamp):
        os.remove(checkout.stamp)
        report("requirements.lock or pyproject.toml has changed: renewing .venv")
    found = prepare_venv(checkout)
    files = write_requirements(checkout, torch_to_keep(checkout, found) or checkout.torch_version())
    install_torch(checkout, lock_fd, found, files[0])
    install_rest(checkout, lock_fd, *files)
    with step(4, "the workbook itself (labs, editable)"):
        pip(checkout, lock_fd, "the workbook", "--no-deps", "-e", checkout.root)
    write(checkout.stamp, digest(checkout))
    report(f"Set-up is done ({time.monotonic() - start:.0f} s). The next start will not repeat it.")


def main(root):
    """Set up the checkout at `root` if it is not current; return an exit code."""
    checkout = Checkout(root)
    try:
        if is_current(checkout):
            report_unused_python(checkout)
        else:
            if fcntl is None:
                raise SetupError("On Windows the workbook runs inside WSL2: clone it there.")
            with exclusive(checkout) as lock_fd:
                if not is_current(checkout):
                    install(checkout, lock_fd)
    except SetupError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"Set-up stopped: {error}. Fix that and run this again.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nSet-up was interrupted; run this again to finish it.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
