"""Make or renew .venv: torch first and alone, the rest under the lock, then this package.

Runs before anything is installed, perhaps on a Python so old that it can only be turned away in
a sentence: hence the standard library alone, and no syntax newer than Python 3.6.
"""

import contextlib
import glob
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from _checkout import Checkout, read, write  # noqa: E402
from _pythons import OLDEST, choose_base, fits, probe, public, spell  # noqa: E402
from _trouble import Trouble, venv_failed, why_pip_failed  # noqa: E402

try:
    import fcntl
except ImportError:  # Windows outside WSL
    fcntl = None

FORMAT = "1"  # raise it when set-up itself changes what it installs
CPU_GB, CUDA_GB, RENEW_GB = 2.5, 8.0, 1.0


def digest(place):
    """Return a hash of everything that decides what .venv should hold."""
    parts = [FORMAT, place.root, read(place.lock), read(place.project)]
    parts.append(read(os.path.join(place.venv, "pyvenv.cfg")))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def is_current(place):
    """Return whether .venv holds what the lock says, without starting a process."""
    return os.path.exists(place.python) and read(place.stamp) == digest(place)


@contextlib.contextmanager
def alone(place):
    """Let one set-up at a time into a checkout; yield the lock's file descriptor."""
    try:
        file = open(os.path.join(place.root, ".setup.lock"), "a")
    except OSError as error:
        raise Trouble(
            f"Set-up cannot write in {place.root} ({error.strerror}): copy the workbook to a "
            "folder of your own, or mend the folder's permissions."
        ) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say("another set-up is running, waiting ...")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def say(text, end="\n"):
    """Print at once: set-up is watched while it works."""
    print(text, end=end, flush=True)


@contextlib.contextmanager
def step(number, what):
    """Announce one of the four steps and say how long it took."""
    start = time.monotonic()
    on_terminal = sys.stdout.isatty()
    say(f"{number}/4 {what} ...", end="\n" if on_terminal else " ")
    try:
        yield
    except BaseException:
        say("" if on_terminal else "failed")
        raise
    say(f"{'    done in ' if on_terminal else ''}{time.monotonic() - start:.0f} s")


def call(command, held, log):
    """Run a command to its end, shown on a terminal, logged elsewhere; return its exit code."""
    shown = sys.stdout.isatty()
    with open(log, "a") as file:
        out, err = (None, None) if shown else (subprocess.DEVNULL, file)
        # The child holds the set-up's lock too: it stays taken even if this process is killed.
        child = subprocess.Popen(command, stdout=out, stderr=err, pass_fds=(held,))
        try:
            return child.wait()
        except BaseException:
            child.terminate()
            child.wait()
            raise


def pip(place, held, what, *arguments):
    """Run pip install in .venv; on failure raise the sentence that fits its log."""
    start = os.path.getsize(place.log) if os.path.exists(place.log) else 0
    command = [place.python, "-m", "pip", "install", "--disable-pip-version-check"]
    if call(command + ["--log", place.log] + list(arguments), held, place.log):
        raise Trouble(explain(place, what, start))


def explain(place, what, start=0):
    """Return one sentence on why pip failed, judged by its log from byte `start` on."""
    with open(place.log, encoding="utf-8", errors="replace") as file:
        file.seek(start)
        text = file.read()
    version = spell((probe(place.python) or {"version": sys.version_info})["version"])
    return f"{why_pip_failed(text, what, version)} (pip's log: {place.log})."


def has_pip(place):
    """Return whether .venv has pip, and give it one if it has not (uv makes it without)."""
    for module in (["pip", "--version"], ["ensurepip"], ["pip", "--version"]):
        done = subprocess.run(
            [place.python, "-m"] + module, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        if done.returncode == 0 and module[0] == "pip":
            return True
    return False


def is_usable(place):
    """Return whether the .venv that is there can be built on; refuse one of an old Python."""
    found = probe(place.python)
    if found is None or os.path.exists(place.on_base):
        return False
    if tuple(found["version"]) < OLDEST:
        raise Trouble(
            f"{place.venv} was made with Python {spell(found['version'])}, and the workbook needs "
            f"{spell(OLDEST)} or newer: remove that folder and run this again."
        )
    return has_pip(place)


def drop_half_installed(place):
    """Forget the packages that an interrupted pip left: it writes their RECORD last."""
    pattern = os.path.join(place.venv, "lib", "python*", "site-packages", "*.dist-info")
    for folder in glob.glob(pattern):
        if not os.path.exists(os.path.join(folder, "RECORD")):
            shutil.rmtree(folder)


def remembered_base(place):
    """Return {'PYTHON': the one whose torch .venv stood on}, or {} if there is none."""
    path = read(place.on_base).strip()
    return {"PYTHON": path} if path and probe(path) else {}


def make_venv(place):
    """Make .venv anew, on top of the base Python's packages if they hold a fitting torch."""
    base = choose_base(dict(remembered_base(place), **os.environ))
    on_base = fits(base["torch"]) and not base["in_venv"]
    check_disk(place.root, RENEW_GB if on_base else None)
    with step(1, f"making .venv with Python {spell(base['version'])}"):
        options = ["--clear"] + (["--system-site-packages"] if on_base else [])
        command = [base["path"], "-m", "venv"] + options + [place.venv]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if done.returncode:
            said = done.stdout.decode(errors="replace").strip() or "nothing"
            raise Trouble(venv_failed(base["path"], said.splitlines()[-1]))
    if on_base:
        write(place.on_base, base["path"] + "\n")


def check_disk(folder, needed=None):
    """Raise a sentence if the disk is too full; `needed` in GB, by default for a new .venv."""
    has_driver = os.path.exists("/proc/driver/nvidia/version")
    needed = needed or (CUDA_GB if has_driver else CPU_GB)
    free = shutil.disk_usage(folder).free / 1e9
    if free < needed:
        raise Trouble(
            f"Too little disk: set-up needs about {needed:.1f} GB and {folder} has {free:.1f} GB "
            "free: make room, or clone the workbook onto a larger disk."
        )


def torch_to_keep(place, found):
    """Return the version of torch in .venv that set-up must leave alone, or None."""
    if not fits(found) or public(found) in (place.torch_pin(), read(place.own_torch).strip()):
        return None
    return found


def write_requirements(place, torch):
    """Write the lock without torch, and a line with this torch; return both paths."""
    rest = [pin for pin in place.pins() if not pin.startswith("torch==")]
    paths = [os.path.join(place.venv, name) for name in ("rest.txt", "torch.txt")]
    write(paths[0], "\n".join(rest) + "\n")
    write(paths[1], f"torch=={torch}\n")
    return paths


def install_torch(place, held, found, rest):
    """Step 2: install the pinned torch, unless a fitting one is there to be kept."""
    pin = place.torch_pin()
    if torch_to_keep(place, found) or os.path.exists(place.on_base):
        say(f"2/4 keeping torch {found}, which is already here (the lock names {pin})")
        return
    if public(found) != pin:
        write(place.own_torch, pin + "\n")
    with step(2, f"torch {pin} (0.2 GB to download, several GB where it comes with CUDA)"):
        pip(place, held, f"torch {pin}", "-c", rest, f"torch=={pin}")


def install_rest(place, held, rest, torch):
    """Step 3: everything else in the lock, held to the torch that is there."""
    arguments = ["-c", torch, "-r", rest]
    if os.path.exists(place.on_base):
        # JupyterLab finds its own files only where it is installed, so what the base has of
        # the lock is installed again; its torch, and what that needs, is not touched.
        arguments += ["--no-deps", "--ignore-installed"]
    with step(3, f"JupyterLab, transformers and the rest: {len(place.pins()) - 1} packages"):
        pip(place, held, "the locked packages", *arguments)
        ask_no_news(place)


def ask_no_news(place):
    """Keep JupyterLab from asking each student about its news, in this .venv only."""
    folder = os.path.join(place.venv, "share", "jupyter", "lab", "settings")
    os.makedirs(folder, exist_ok=True)
    setting = {"@jupyterlab/apputils-extension:notification": {"fetchNews": "false"}}
    write(os.path.join(folder, "overrides.json"), json.dumps(setting) + "\n")


def install(place, held):
    """Bring .venv to what the lock says; the stamp is written last."""
    start = time.monotonic()
    place.torch_pin()
    if os.path.exists(place.stamp):
        os.remove(place.stamp)
        say("requirements.lock or pyproject.toml has changed: renewing .venv")
    if is_usable(place):
        drop_half_installed(place)
        check_disk(place.root, RENEW_GB if probe(place.python)["torch"] else None)
        say(f"1/4 using .venv as it is (Python {spell(probe(place.python)['version'])})")
    else:
        make_venv(place)
    write(place.log, "")
    found = probe(place.python)["torch"]
    files = write_requirements(place, torch_to_keep(place, found) or place.torch_pin())
    install_torch(place, held, found, files[0])
    install_rest(place, held, *files)
    with step(4, "the workbook itself (labs, editable)"):
        pip(place, held, "the workbook", "--no-deps", "-e", place.root)
    write(place.stamp, digest(place))
    say(f"Set-up is done ({time.monotonic() - start:.0f} s). The next start will not repeat it.")


def main(root):
    """Set up the checkout at `root` if it is not current; return an exit code."""
    place = Checkout(root)
    try:
        if not is_current(place):
            if fcntl is None:
                raise Trouble("On Windows the workbook runs inside WSL2: clone it there.")
            with alone(place) as held:
                if not is_current(place):
                    install(place, held)
    except Trouble as trouble:
        print(trouble, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"Set-up stopped: {error}. Mend that and run this again.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nSet-up was interrupted; run this again to finish it.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
