"""What an archive for students holds, and how it is written."""

import gzip
import io
import subprocess
import tarfile
import zipfile
from datetime import UTC, datetime
from pathlib import Path

# A list of what goes in, not of what stays out: a new file is no leak. Folders end in a slash.
INCLUDED = (
    ".devcontainer/", ".gitignore", "CITATION.cff", "GLOSSARY.md", "LICENSE", "LICENSE-text.md",
    "environment.yml", "experiments/reference/two_hosts.json",
    "experiments/reference/zero_deepspeed.json", "labs/", "notebooks/", "pyproject.toml",
    "requirements.lock", "scripts/_arguments.py", "scripts/_check_arguments.py",
    "scripts/_checkout.py", "scripts/_grade/bubblewrap.py", "scripts/_notebooks.py",
    "scripts/_on_gpu/__init__.py", "scripts/_on_gpu/parts.py", "scripts/_pip.py", "scripts/_plan/",
    "scripts/_preflight/", "scripts/_pythons.py", "scripts/_setup.py", "scripts/_setup.sh",
    "scripts/_setup_errors.py", "scripts/_unattended/", "scripts/_uv.py",
    "scripts/cloud/jupyterhub_config.py", "scripts/cloud/single-user", "scripts/cluster/",
    "scripts/lab", "scripts/plan", "scripts/preflight", "scripts/work")
README = Path(__file__).with_name("README.students.md")
VARIANT = "labs/workers/variant.txt"
# What a change must touch to stand in the students' changelog.
_CHANGES = ("notebooks", "labs", "scripts/lab", "scripts/work", "scripts/plan",
            "scripts/preflight", "requirements.lock")


class ReleaseError(Exception):
    """Git could not do what a release needs; the sentence says what."""


def write(root: Path, tag: str, variant: str, out: Path) -> list[Path]:
    """Writes the archive of the last commit as .tar.gz and .zip, and returns their paths. Two runs
    on one commit write the same bytes. Raises ReleaseError."""
    name = f"workbook-{tag}" + (f"-{variant}" if variant else "")
    when = int(_git(root, "log", "-1", "--format=%ct"))
    files = members(root)
    files["README.md"] = README.read_bytes(), False
    files["CHANGELOG.md"] = changelog(root, tag).encode(), False
    if variant:
        files[VARIANT] = f"{variant}\n".encode(), False
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"{name}.tar.gz", out / f"{name}.zip"]
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for path, (data, runs) in sorted(files.items()):
            info = tarfile.TarInfo(f"{name}/{path}")
            info.size, info.mtime, info.mode = len(data), when, 0o755 if runs else 0o644
            tar.addfile(info, io.BytesIO(data))
    paths[0].write_bytes(gzip.compress(packed.getvalue(), mtime=when))
    moment = datetime.fromtimestamp(when, UTC).timetuple()[:6]
    with zipfile.ZipFile(paths[1], "w", zipfile.ZIP_DEFLATED) as packed:
        for path, (data, runs) in sorted(files.items()):
            info = zipfile.ZipInfo(f"{name}/{path}", moment)
            info.external_attr = (0o100755 if runs else 0o100644) << 16
            packed.writestr(info, data, zipfile.ZIP_DEFLATED)
    return paths


def members(root: Path) -> dict[str, tuple[bytes, bool]]:
    """Path -> (content, whether it may be started) of what students get of the last commit."""
    found = {}
    with tarfile.open(fileobj=io.BytesIO(_git(root, "archive", "--format=tar", "HEAD"))) as tar:
        for info in tar:
            if info.isfile() and is_included(info.name):
                found[info.name] = tar.extractfile(info).read(), bool(info.mode & 0o100)
    return found


def is_included(path: str) -> bool:
    """Whether students get this file of the repository."""
    return any(path.startswith(each) if each.endswith("/") else path == each for each in INCLUDED)


def changelog(root: Path, tag: str) -> str:
    """The subjects of the commits since the last tag that changed what students get."""
    last = _last_tag(root, tag)
    if not last:
        return f"# {tag}\n\nThe first release.\n"
    lines = _git(root, "log", "--no-merges", "--format=- %s", f"{last}..HEAD", "--",
                 *_CHANGES).decode().splitlines()
    return "\n".join([f"# {tag}", "", f"Since {last}:", "",
                      *(lines or ["- nothing that students see"]), ""])


def _last_tag(root, tag) -> str:
    tags = _git(root, "tag", "--merged", "HEAD", "--sort=-creatordate").decode().split()
    return next((each for each in tags if each != tag), "")


def add_tag(root: Path, tag: str) -> bool:
    """Tags the last commit; False where it has the tag. Raises ReleaseError where another commit
    has it."""
    if tag in _git(root, "tag").decode().split():
        if tag in _git(root, "tag", "--points-at", "HEAD").decode().split():
            return False
        raise ReleaseError(f"the tag {tag} is another commit's: choose another name.")
    _git(root, "tag", "-a", tag, "-m", f"Release {tag}")
    return True


def _git(root, *arguments) -> bytes:
    try:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, check=True).stdout
    except FileNotFoundError:
        raise ReleaseError("there is no git on this machine.") from None
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip()
        raise ReleaseError(f"git {arguments[0]} failed: {said}") from None
