"""The three lists of dependencies agree, and set-up does what it says, or says why it cannot."""

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from importlib.machinery import SourceFileLoader
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path

import psutil
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts"
LOCK = (ROOT / "requirements.lock").read_text()
CUDA = re.compile(r"(nvidia-|cuda-|triton$|setuptools$)")


def load(name):
    """Import one of the private modules in scripts/."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(SCRIPTS))


errors = load("_setup_errors")
checkouts = load("_checkout")
pythons = load("_pythons")
uv = load("_uv")
installer = load("_pip")
setup = load("_setup")
runner = load("_test_run")


def pins():
    """Return {canonical name: (version, marker)} of the lock."""
    lines = [line for line in LOCK.splitlines() if not line.startswith("#")]
    needs = [Requirement(line.split("#")[0]) for line in lines]
    return {
        canonicalize_name(need.name): (next(iter(need.specifier)).version, need.marker)
        for need in needs
    }


def declared():
    """Return every dependency of pyproject.toml, extras included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    lines = project["dependencies"] + [line for extra in extras for line in extra]
    return [Requirement(line) for line in lines]


# ---- the three lists


def test_each_line_of_the_lock_is_an_exact_pin_and_sorted():
    lines = [line for line in LOCK.splitlines() if not line.startswith("#")]
    assert all(re.match(r"[\w.-]+==[\w.]+( ; .+?)?(  # python [<>=!~\d.,*]+)?$", line)
               for line in lines)
    assert lines == sorted(lines, key=lambda line: line.split("==")[0].lower())


def test_torch_is_pinned_to_one_public_version():
    assert re.findall(r"^torch=\S*", LOCK, re.MULTILINE) == ["torch==2.13.0"]


@pytest.mark.parametrize("need", declared(), ids=str)
def test_each_declared_dependency_is_pinned_within_its_bound(need):
    version, _ = pins()[canonicalize_name(need.name)]
    assert need.specifier.contains(version, prereleases=True)


def test_the_lock_is_closed_under_what_its_packages_require():
    missing = set()
    for name in pins():
        try:
            needs = [Requirement(line) for line in requires(name) or []]
        except PackageNotFoundError:
            continue
        wanted = [n for n in needs if not n.marker or n.marker.evaluate({"extra": ""})]
        names = {canonicalize_name(need.name) for need in wanted}
        missing |= {n for n in names - set(pins()) if not CUDA.match(n)}
    assert not missing


def test_the_lock_has_no_package_for_one_platform_without_a_marker():
    assert not [name for name in pins() if CUDA.match(name)]
    assert "Darwin" in str(pins()["appnope"][1])


def test_conda_installs_the_same_lock_and_this_package():
    text = (ROOT / "environment.yml").read_text()
    pip_part = text.split("- pip:")[1]
    assert re.findall(r"^\s+- (.+)$", pip_part, re.MULTILINE) == ["-r requirements.lock", "-e ."]
    assert "name: data-parallel-workbook" in text


def test_conda_and_pyproject_ask_for_the_same_oldest_python():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = f">={pythons.minor_version(pythons.OLDEST)}"
    assert project["requires-python"] == oldest
    assert f"python {oldest}" in (ROOT / "environment.yml").read_text()


def test_torch_bound_is_the_one_set_up_keeps_an_installed_torch_by():
    bound = next(need for need in declared() if need.name == "torch").specifier
    for version in ("2.10.1", "2.11.0", "2.13.0", "3.0"):
        assert pythons.is_supported_torch(version) == bound.contains(version)


def test_the_lock_notes_which_python_each_installed_package_needs():
    noted = {pin.requirement: pin.python for pin in checkouts.Checkout(str(ROOT)).all_pins()}
    for requirement, note in noted.items():
        name, version = requirement.split("==")
        try:
            metadata = distribution(name).metadata
        except PackageNotFoundError:
            continue
        if metadata["Version"].split("+")[0] == version:
            needs = metadata["Requires-Python"] or ""
            assert SpecifierSet(note) == SpecifierSet(needs), requirement


@pytest.mark.parametrize("python", [(*pythons.OLDEST, 0), (3, 14, 0)], ids=str)
def test_every_pin_runs_on_the_oldest_and_the_newest_python_that_is_promised(python):
    assert pythons.rejecting_pin(checkouts.Checkout(str(ROOT)).all_pins(), python) is None


@pytest.mark.parametrize("clause", [
    ">=3.11.5", ">=3.9,<4", ">3.11", "<3.14", "!=3.12.*,>=3.9", "==3.11.*", "~=3.11", "~=3.11.4",
    "!=3.11.2", "<=3.12", "==3.12", ""])
def test_requires_python_is_read_as_packaging_reads_it(clause):
    for text in ("3.10.9", "3.11.0", "3.11.2", "3.11.5", "3.12.0", "3.12.1", "3.14.0", "4.0.0"):
        version = tuple(map(int, text.split(".")))
        wanted = SpecifierSet(clause).contains(text)
        assert pythons.accepts(clause, version) == wanted, version


@pytest.mark.parametrize("name", ["requirements.lock", "pyproject.toml", "environment.yml"])
def test_no_list_names_a_host_or_an_index(name):
    """But for the repository's own address, once scripts/address has written it."""
    text = load("_address").TABLE.sub("", (ROOT / name).read_text())
    assert not re.search(r"https?:|file:|://|index-url|find-links|\.(com|org|io)\b", text)


@pytest.fixture
def lock(monkeypatch):
    """scripts/lock as a module, in an environment of three packages."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    loader = SourceFileLoader("lock_script", str(SCRIPTS / "lock"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("lock_script", loader))
    loader.exec_module(module)
    monkeypatch.setattr(module, "installed", lambda python: [
        ("appnope", "1.0.0", ""), ("soupsieve", "2.10", ">= 3.10, <4"),
        ("torch", "2.13.0+cpu", "")])
    return module


def test_the_lock_has_public_versions_markers_and_the_python_of_each_package(lock):
    assert list(lock.lock_lines("python", {"appnope": 'platform_system == "Darwin"'})) == [
        'appnope==1.0.0 ; platform_system == "Darwin"', "soupsieve==2.10  # python <4,>=3.10",
        "torch==2.13.0"]


def test_a_package_that_the_oldest_python_cannot_run_gets_into_no_lock(lock, monkeypatch):
    monkeypatch.setattr(lock, "installed", lambda python: [("soupsieve", "4.1.1", ">=3.11.5")])
    with pytest.raises(SystemExit, match="soupsieve 4.1.1 needs Python >=3.11.5, and .* 3.11.0"):
        list(lock.lock_lines("python", {}))


def test_pins_that_are_kept_run_on_the_oldest_python_and_leave_torch_free(lock, tmp_path):
    (tmp_path / "requirements.lock").write_text(
        "six==1.17.0  # python >=2.7\nsoupsieve==4.1.1  # python >=3.11.5\ntorch==2.13.0\n")
    lock.ROOT = tmp_path
    assert lock.pins_to_keep() == ["six==1.17.0"]


# ---- the sentences


def python(version, venv=True, torch=None, in_venv=False):
    path = f"/usr/bin/python{version}"
    numbers = [int(part) for part in version.split(".")]
    return dict(path=path, version=numbers, venv=venv, torch=torch, in_venv=in_venv)


def choose(monkeypatch, found, environ=None, pins=()):
    """Choose a base Python on a machine that has the given ones, by name."""
    monkeypatch.setattr(pythons, "probe", found.get)
    return pythons.choose_base(environ or {}, pins)


def refusal(monkeypatch, found, environ=None, pins=()):
    """Return the sentence with which the choice of a Python is refused."""
    with pytest.raises(errors.SetupError) as caught:
        choose(monkeypatch, found, environ, pins)
    return str(caught.value)


SOUPSIEVE = checkouts.Pin("soupsieve==4.1.1", "", ">=3.11.5")


def test_a_python_that_a_pin_does_not_run_on_is_refused_with_both_names(monkeypatch):
    said = refusal(monkeypatch, {"python3": python("3.11.2")}, pins=[SOUPSIEVE])
    assert "/usr/bin/python3.11.2 is Python 3.11.2" in said
    assert "soupsieve==4.1.1 in requirements.lock needs Python >=3.11.5" in said
    assert "set PYTHON" in said and "nothing has been downloaded" in said


def test_a_python_that_every_pin_runs_on_comes_first(monkeypatch):
    found = {"python3.11": python("3.11.2", torch="2.13.0"), "python3": python("3.11.7")}
    assert choose(monkeypatch, found, pins=[SOUPSIEVE])["version"] == [3, 11, 7]


def test_an_environment_that_a_pin_does_not_run_on_is_refused_before_any_download(
        checkout, installed, capsys):
    with open(checkout / "requirements.lock", "a") as lock:
        lock.write("zzz==1.0  # python >=3.99.1\n")
    assert setup.main(str(checkout)) == 1 and not installed
    said = capsys.readouterr().err
    assert "zzz==1.0 in requirements.lock needs Python >=3.99.1" in said
    assert f"remove {checkout / '.venv'}" in said and said.count("\n") == 1


def test_an_old_python_is_refused_with_its_version(monkeypatch):
    said = refusal(monkeypatch, {"python3": python("3.9")})
    assert "3.11 or newer" in said and "3.9" in said and "install Python" in said


def test_a_named_python_that_does_not_run_is_named(monkeypatch):
    said = refusal(monkeypatch, {}, {"PYTHON": "/opt/none"})
    assert "PYTHON=/opt/none does not run" in said


def test_a_python_without_venv_is_refused_with_the_package_to_install(monkeypatch):
    said = refusal(monkeypatch, {"python3": python("3.11", venv=False)})
    assert "apt install python3.11-venv" in said


def test_the_newest_usable_python_is_taken(monkeypatch):
    found = {
        "python3.13": python("3.13", venv=False),
        "python3.12": python("3.12"),
        "python3.11": python("3.11"),
        "python3": python("3.9"),
    }
    assert choose(monkeypatch, found)["version"] == [3, 12]


def test_a_python_with_a_fitting_torch_comes_first(monkeypatch):
    found = {"python3.13": python("3.13"), "python3": python("3.11", torch="2.11.0+cu130")}
    assert choose(monkeypatch, found)["torch"] == "2.11.0+cu130"


def test_the_torch_of_an_active_environment_does_not_count(monkeypatch):
    active = python("3.11", torch="2.11.0", in_venv=True)
    assert choose(monkeypatch, {"python3.13": python("3.13"), "python3": active})["torch"] is None


@pytest.mark.parametrize(
    ("log", "start"),
    [
        ("NewConnectionError: ... \nERROR: ResolutionImpossible: x", "No network"),
        ("ReadTimeoutError ... Max retries exceeded", "No network"),
        ("OSError: [Errno 28] No space left on device", "The disk filled up"),
        ("ERROR: ResolutionImpossible: for help visit", "pip found no set of versions"),
        ("ERROR: No matching distribution found for torch==9", "The package index has no build"),
        ("something never seen", "Installing torch failed"),
    ],
)
def test_a_failed_pip_is_explained(log, start):
    said = errors.why_pip_failed(log, "torch", "3.11")
    assert said.startswith(start) and "torch" in said and "\n" not in said


def test_the_reason_that_pip_gives_is_in_the_sentence():
    log = ("2026-11-21T17:00:00,001 ERROR: Ignored the following versions that require a different "
           "python version: 3.0.2 Requires-Python >=3.11.4; 4.1.1 Requires-Python >=3.11.5; "
           "4.1.2 Requires-Python >=3.11.6\n"
           "2026-11-21T17:00:00,002 ERROR: Could not find a version that satisfies the requirement "
           "soupsieve==4.1.1 (from versions: 0, 0.1, 2.10)\n"
           "2026-11-21T17:00:00,003 ERROR: No matching distribution found for soupsieve==4.1.1\n"
           "ERROR: No matching distribution found for soupsieve==4.1.1\n")
    said = errors.why_pip_failed(log, "the locked packages", "3.11")
    assert said.endswith('pip says: "No matching distribution found for soupsieve==4.1.1 '
                         '(Requires-Python >=3.11.5)"')


def test_two_reasons_of_pip_are_quoted_in_order_and_once():
    log = "1 ERROR: one.\nERROR: two\n2 ERROR: two\nERROR: three"
    assert errors.why_pip_failed(log, "torch", "3.11").endswith('pip says: "two"; "three"')


def test_a_long_reason_is_shortened():
    said = errors.why_pip_failed("ERROR: " + "x" * 999, "torch", "3.11")
    assert len(said) < 400 and said.endswith('..."')


def test_set_up_says_first_how_long_it_takes_and_how_much_it_downloads(
        checkout, installed, capsys):
    setup.main(str(checkout))
    at_once, sizes, *steps = capsys.readouterr().out.splitlines()
    assert at_once == "Set-up runs once. It looks for a fitting Python here ..."
    assert re.search(r"downloads about \d+ MB .*takes about half a minute more on 2 cores", sizes)
    assert "with CUDA several GB" in sizes
    said = "\n".join(steps)  # and each step what it downloads
    assert f"2/4 uv, which installs (about {setup.UV_MB} MB), then torch 2.13.0 (about" in said
    assert re.search(rf"3/4 JupyterLab, .* \d+ packages, about {setup.REST_MB} MB", said)


@pytest.mark.parametrize("reason", ["it is here", "not wanted", "on another Python's packages"])
def test_uv_is_not_announced_where_it_is_not_downloaded(checkout, monkeypatch, reason):
    root = checkouts.Checkout(str(checkout))
    assert uv.is_missing(root)
    if reason == "it is here":
        version = uv.pin(root).partition("==")[2]
        packages = next((checkout / ".venv" / "lib").glob("python*/site-packages"))
        (packages / f"uv-{version}.dist-info").mkdir()
    elif reason == "not wanted":
        monkeypatch.setenv("WORKBOOK_UV", "0")
    else:
        Path(root.base_python).touch()
    assert not uv.is_missing(root)


def test_a_torch_that_stays_is_not_counted_as_a_download(checkout, installed, capsys):
    put_torch(checkout, "2.11.0+cu130")
    setup.main(str(checkout))
    sizes = capsys.readouterr().out.splitlines()[1]
    assert f"about {setup.REST_MB} MB" in sizes and "CUDA" not in sizes


def test_too_little_disk_is_refused_before_anything_is_installed(monkeypatch, tmp_path):
    usage = shutil.disk_usage(tmp_path)._replace(free=1_200_000_000)
    monkeypatch.setattr(setup.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(errors.SetupError, match=r"about 2.5 GB and .* has 1.2 GB free"):
        setup.check_disk(str(tmp_path), setup.CPU_GB)


def test_a_folder_that_cannot_be_written_is_named(checkout, monkeypatch, capsys):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(setup, "open", refuse, raising=False)
    monkeypatch.setattr(setup, "is_current", lambda root: False)
    assert setup.main(str(checkout)) == 1
    assert f"cannot write in {checkout} (Permission denied)" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["_setup", "_checkout", "_pip", "_uv", "_pythons", "_setup_errors",
                                  "_check_arguments", "_test_options",
                                  "_build/command", "_bench/__main__", "_animate/__main__"])
def test_set_up_is_readable_by_old_pythons(name):
    ast.parse((SCRIPTS / f"{name}.py").read_text(), feature_version=(3, 6))


# ---- when it installs


@pytest.fixture
def checkout(tmp_path):
    """A checkout with an empty .venv that has no pip of its own."""
    root = tmp_path / "workbook"
    shutil.copytree(SCRIPTS, root / "scripts")
    for name in ("requirements.lock", "pyproject.toml"):
        shutil.copy(ROOT / name, root / name)
    (root / "notebooks").mkdir()
    (root / "notebooks" / "00_start_here.ipynb").write_text("{}")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", root / ".venv"], check=True)
    return root.resolve()


@pytest.fixture
def installed(checkout, monkeypatch):
    """The pip calls that set-up makes in `checkout`, where nothing is really installed."""
    calls = []
    monkeypatch.setattr(setup, "ensure_pip", lambda root: True)
    monkeypatch.setattr(setup, "check_disk", lambda *_: None)
    monkeypatch.setattr(setup, "pip", lambda root, fd, what, *rest: calls.append(rest))
    return calls


# ---- uv, or pip


@pytest.mark.parametrize("listed, arguments, environment", [
    ("", [], {}),
    ("global.index-url='http://a/simple'\nglobal.timeout='60'\n",
     ["--default-index", "http://a/simple"], {"UV_HTTP_TIMEOUT": "60"}),
    ("global.extra-index-url='file:///a http://b'\n:env:.find-links='/wheels'",
     ["--index-strategy", "unsafe-best-match", "--index", "file:///a", "--index", "http://b",
      "--find-links", "/wheels"], {}),
    ("global.cert='/a.pem'\ninstall.trusted-host='a b'\nglobal.proxy='http://p:3128'",
     ["--allow-insecure-host", "a", "--allow-insecure-host", "b"],
     {"SSL_CERT_FILE": "/a.pem", "HTTP_PROXY": "http://p:3128", "HTTPS_PROXY": "http://p:3128"}),
    # the environment goes before a file, and what holds for install before what holds for all
    ("global.index-url='http://a'\n:env:.index-url='http://c'\ninstall.index-url='http://b'",
     ["--default-index", "http://c"], {}),
    ("global.no-index='false'\n:env:.disable-pip-version-check='1'\nlist.format='json'", [], {}),
    ("global.constraint='/a.txt'\nglobal.no-cache-dir='true'", ["-c", "/a.txt", "--no-cache"], {}),
])
def test_uv_is_told_pips_settings(listed, arguments, environment):
    assert uv.settings(listed) == (arguments, environment)


@pytest.mark.parametrize("listed", ["install.user='true'", "global.require-hashes='true'",
                                    "global.no-binary=':all:'", "global.keyring-provider='import'"])
def test_a_setting_that_uv_lacks_leaves_it_to_pip(listed):
    assert uv.settings(listed) is None


@pytest.mark.parametrize("fails", [False, True])
def test_pip_goes_on_where_uv_fails(checkout, monkeypatch, fails):
    commands, environments = [], {}

    def call(command, lock_fd, log, environment=None):
        commands.append(command[3])
        environments[command[3]] = environment
        return int(fails and command[3] == "uv")

    monkeypatch.setattr(uv, "settings_of", lambda root: ([], {}))
    monkeypatch.setattr(installer, "call", call)
    root = checkouts.Checkout(str(checkout))
    installer.pip(root, 0, "a package", "a==1")
    # uv itself by pip, the package by uv, and by pip where that failed
    assert commands == ["pip", "uv"] + ["pip"] * fails
    # pip compiles what it installs, uv only if it is told to
    assert environments["uv"]["UV_COMPILE_BYTECODE"] == "1"
    assert not os.path.exists(uv.unfinished(root))


def test_without_uv_pip_installs(checkout, monkeypatch):
    commands = []
    monkeypatch.setenv("WORKBOOK_UV", "0")
    monkeypatch.setattr(installer, "call", lambda command, *_: commands.append(command[3]))
    installer.pip(checkouts.Checkout(str(checkout)), 0, "a package", "a==1")
    assert commands == ["pip"]


def test_what_uv_left_half_installed_is_installed_again(checkout):
    root = checkouts.Checkout(str(checkout))
    packages = next((checkout / ".venv" / "lib").glob("python*")) / "site-packages"
    for name, files in {"whole": {"whole.py": "x = 1\n"}, "part": {"part.py": ""},
                        "cut": {"cut.py": "x ="}}.items():
        (packages / f"{name}-1.dist-info").mkdir()
        (packages / f"{name}-1.dist-info" / "RECORD").write_text(
            f"{name}.py,sha256=x,6\n{name}/__pycache__/a.pyc,,\n{name}-1.dist-info/RECORD,,\n")
        for file, text in files.items():
            if name != "part":
                (packages / file).write_text(text)
    installer.drop_half_installed(root)
    assert len(list(packages.glob("*-1.dist-info"))) == 3  # nothing was stopped
    Path(uv.unfinished(root)).touch()
    installer.drop_half_installed(root)
    assert [path.name for path in packages.glob("*-1.dist-info")] == ["whole-1.dist-info"]
    assert not os.path.exists(uv.unfinished(root))


def test_torch_is_installed_first_and_alone_then_the_rest_then_the_package(checkout, installed):
    assert setup.main(str(checkout)) == 0
    torch, rest, package = installed
    assert torch[-1] == "torch==2.13.0" and "-r" not in torch
    assert Path(rest[1]).read_text() == "torch==2.13.0\n"
    assert torch[1] == rest[3] and "torch==" not in Path(rest[3]).read_text()
    assert package == ("--no-deps", "-e", str(checkout))


def test_a_second_start_installs_nothing_and_a_changed_lock_does(checkout, installed):
    setup.main(str(checkout))
    setup.main(str(checkout))
    assert len(installed) == 3
    with open(checkout / "requirements.lock", "a") as lock:
        lock.write("another==1.0\n")
    setup.main(str(checkout))
    assert len(installed) == 6


def test_an_interrupted_set_up_is_taken_up_again(checkout, installed, monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(setup, "install_rest", interrupt)
        assert setup.main(str(checkout)) == 130
    assert "run this again" in capsys.readouterr().err
    assert setup.main(str(checkout)) == 0 and len(installed) == 4


def put_torch(checkout, version, complete=True):
    """Put the metadata of a torch into .venv, as if pip had installed it to the end or not."""
    packages = next((checkout / ".venv" / "lib").glob("python*")) / "site-packages"
    folder = packages / f"torch-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    if complete:
        (folder / "RECORD").write_text("")


def test_a_fitting_torch_in_the_environment_is_kept(checkout, installed, capsys):
    put_torch(checkout, "2.11.0+cu130")
    setup.main(str(checkout))
    assert "keeping torch 2.11.0+cu130" in capsys.readouterr().out
    assert len(installed) == 2 and "torch==2.11.0+cu130" in Path(installed[0][1]).read_text()


def test_a_torch_that_set_up_installed_follows_the_lock(checkout, installed):
    setup.main(str(checkout))
    put_torch(checkout, "2.13.0+cpu")
    lock = checkout / "requirements.lock"
    lock.write_text(lock.read_text().replace("torch==2.13.0", "torch==2.14.0"))
    setup.main(str(checkout))
    assert installed[3][-1] == "torch==2.14.0"


def test_a_torch_too_old_is_replaced(checkout, installed):
    put_torch(checkout, "2.6.0")
    setup.main(str(checkout))
    assert installed[0][-1] == "torch==2.13.0"


def test_a_torch_that_was_only_half_installed_does_not_count(checkout, installed):
    put_torch(checkout, "2.12.0", complete=False)
    setup.main(str(checkout))
    assert installed[0][-1] == "torch==2.13.0"


@pytest.mark.slow
def test_a_torch_of_the_base_python_is_kept(checkout, installed, monkeypatch, capsys):
    base = python("3.11", torch="2.11.0+cu130") | {"path": sys.executable}
    monkeypatch.setattr(setup, "choose_base", lambda environ, pins: base)
    (checkout / ".venv" / "bin" / "python").unlink()
    assert setup.main(str(checkout)) == 0
    assert "keeping torch" in capsys.readouterr().out
    assert "system-site-packages = true" in (checkout / ".venv" / "pyvenv.cfg").read_text()
    assert len(installed) == 2 and "--no-deps" in installed[0]


@pytest.mark.slow
def test_a_broken_environment_is_made_again(checkout, installed, monkeypatch):
    (checkout / ".venv" / "bin" / "python").unlink()
    monkeypatch.setenv("PYTHON", sys.executable)
    assert setup.main(str(checkout)) == 0
    assert pythons.probe(str(checkout / ".venv" / "bin" / "python"))["venv"]


# ---- the commands


@pytest.fixture
def ready(checkout, installed):
    """A checkout that is set up, whose JupyterLab prints its arguments and leaves."""
    setup.main(str(checkout))
    packages = next((checkout / ".venv" / "lib").glob("python*")) / "site-packages"
    (packages / "jupyterlab.py").write_text("import json, sys; print(json.dumps(sys.argv[1:]))")
    return checkout


def lab(checkout, *arguments):
    """Run scripts/lab; return what JupyterLab was given and the seconds it took."""
    start = time.monotonic()
    command = [checkout / "scripts" / "lab", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), time.monotonic() - start


def test_lab_opens_the_first_notebook_on_loopback_and_passes_arguments_on(ready):
    given, _ = lab(ready, "--no-browser", "--port", "8899")
    assert "--LabApp.default_url=/lab/tree/work/00_start_here.ipynb" in given
    assert given[-3:] == ["--no-browser", "--port", "8899"]
    assert "--ServerApp.ip=127.0.0.1" in given
    assert ("--allow-root" in given) == (os.getuid() == 0)
    assert not [option for option in given if "token" in option or "password" in option]


def test_lab_opens_the_notebook_it_is_given(ready):
    """A notebook of the repository is opened as the student's own copy."""
    other = ready / "notebooks" / "02_manual_ddp.ipynb"
    other.write_text("{}")
    address = "--LabApp.default_url=/lab/tree/work/02_manual_ddp.ipynb"
    for named in (str(other), "02"):
        assert address in lab(ready, named)[0]
    for number in ("07b", "07a"):
        (ready / "notebooks" / f"{number}_x.ipynb").write_text("{}")
    for named, opened in (("07a", "07a"), ("07b", "07b"), ("07", "07a"),
                          (str(ready / "notebooks" / "07b_x.ipynb"), "07b")):
        assert f"--LabApp.default_url=/lab/tree/work/{opened}_x.ipynb" in lab(ready, named)[0]
    assert (ready / "work" / "02_manual_ddp.ipynb").read_text() == "{}"


def test_lab_opens_a_notebook_outside_the_workbook(ready, tmp_path):
    other = tmp_path / "mine.ipynb"
    other.write_text("{}")
    assert lab(ready, str(other))[0][-1] == str(other.resolve())


def test_a_second_start_takes_less_than_a_second(ready):
    assert min(lab(ready)[1] for _ in range(3)) < 1.0


def test_lab_names_a_notebook_that_is_not_there(ready):
    command = [ready / "scripts" / "lab", "notebooks/99_none.ipynb"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "no notebook notebooks/99_none.ipynb" in done.stderr


@pytest.mark.parametrize(("command", "said"), [
    ("build --nonsense", "unrecognized arguments: --nonsense"),
    ("build 99_none", "There is no solutions/99_none.py"),
    ("test --fsat", "unrecognized arguments: --fsat"),
    ("test tests/none.py", "There is no tests/none.py"),
    ("bench", "arguments are required: bench"),
    ("bench none", "invalid choice: 'none'"),
    ("bench launch --rounds 0", "argument --rounds: 0 is not above 0"),
    ("bench trace --mb large", "argument --mb: invalid float value: 'large'"),
    ("animate --only none", "argument --only: invalid choice: 'none'"),
    ("lock --nonsense", "unrecognized arguments: --nonsense"),
    ("lock 2.13.0+cpu", "2.13.0+cpu is no version of torch that every machine has"),
    ("lab notebooks/99_none.ipynb", "no notebook notebooks/99_none.ipynb"),
    ("lab 99", "no notebook 99"),
    ("work --take 99", "there is no notebook 99")])
def test_bad_arguments_are_answered_before_any_set_up(checkout, command, said):
    script, *arguments = command.split()
    done = run_script(checkout, script, *arguments)
    assert done.returncode in (1, 2) and said in done.stderr and not done.stdout


@pytest.mark.parametrize("script", sorted(
    path.name for path in SCRIPTS.iterdir() if path.is_file() and not path.suffix))
def test_help_is_answered_before_any_set_up(checkout, script):
    done = run_script(checkout, script, "--help")
    assert done.returncode == 0 and not done.stderr
    assert re.match(rf"usage: scripts/{script}", done.stdout, re.IGNORECASE)


def run_script(checkout, script, *arguments):
    """Run one of the scripts in a checkout that is not set up, and hold that it still is not."""
    command = [checkout / "scripts" / script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=checkout)
    assert not list((checkout / ".venv").glob("setup.*")) and not list(checkout.glob(".setup*"))
    return done


def test_a_path_without_tests_is_an_error_sentence(tmp_path):
    (tmp_path / "test_empty.py").write_text("")
    command = [sys.executable, SCRIPTS / "_test_run.py"]
    done = subprocess.run([*command, "none.py"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1 and "There is no none.py" in done.stderr
    done = subprocess.run([*command, "test_empty.py"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1 and "No test is selected by" in done.stdout
    assert done.stdout.splitlines()[-1] == "0 passed, 1 failed, 0 skipped"


def test_stages_count_what_pytest_counts(tmp_path):
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert False\n"
        "@pytest.mark.skip\n"
        "def test_left_out(): pass\n"
    )
    command = [sys.executable, SCRIPTS / "_test_run.py", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "1 passed, 1 failed, 1 skipped"


def test_all_notebooks_are_run_those_that_take_longest_first(monkeypatch):
    took = {"solutions/06_scaling.ipynb::all cells": 200.0,
            "notebooks/02_manual_ddp.ipynb::all cells": 9.0}
    monkeypatch.setattr(runner._test_durations, "read", lambda: took)
    found = runner.all_notebooks()
    assert [f"{name}::all cells" for name in found[:2]] == list(took)
    assert sorted(found) == sorted(path.relative_to(ROOT).as_posix() for path in
                                   ROOT.glob("[ns]*s/*.ipynb"))


@pytest.mark.slow
def test_a_term_signal_ends_the_driver_with_its_children(tmp_path):
    (tmp_path / "test_long.py").write_text(
        "import subprocess, time\n"
        "def test_long():\n"
        "    child = subprocess.Popen(['sleep', '99'], start_new_session=True)\n"
        f"    open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "    time.sleep(99)\n"
    )
    driver = subprocess.Popen([sys.executable, SCRIPTS / "_test_run.py", tmp_path],
                              stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    family = psutil.Process(driver.pid).children(recursive=True)
    driver.terminate()
    said, _ = driver.communicate(timeout=20)
    assert driver.returncode == 143 and "The tests were ended by SIGTERM." in said
    assert len(family) >= 2 and not psutil.wait_procs(family, timeout=5)[1]


@pytest.mark.parametrize("wanted, words", [
    (None, ""), (sys.executable, ""), ("/bin/false", "PYTHON=/bin/false is not used: .venv is "
                                                     "already here, made with ")])
def test_a_python_that_changes_nothing_is_named(tmp_path, monkeypatch, wanted, words):
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    (folder / "python").symlink_to(os.path.realpath(sys.executable))
    monkeypatch.delenv("PYTHON", raising=False)
    if wanted:
        monkeypatch.setenv("PYTHON", wanted)
    said = setup.unused_python(checkouts.Checkout(str(tmp_path)))
    assert said.startswith(words) and bool(said) == bool(words)


DEBIANS = "/usr/bin/python3"


@pytest.fixture
def debians():
    """The system's own Python, where it is one of the oldest version that is promised."""
    found = pythons.probe(DEBIANS)
    if not found or tuple(found["version"][:2]) != pythons.OLDEST or not found["venv"]:
        pytest.skip(f"{DEBIANS} is not a Python {pythons.minor_version(pythons.OLDEST)} with venv")
    return DEBIANS


def test_set_up_takes_the_oldest_python_that_is_promised(debians):
    pins = checkouts.Checkout(str(ROOT)).all_pins()
    assert pythons.choose_base({"PYTHON": debians}, pins)["path"] == debians


@pytest.mark.slow
def test_the_oldest_python_can_install_every_pin(debians, tmp_path):
    subprocess.run([debians, "-m", "venv", tmp_path / "venv"], check=True)
    pins = [pin.requirement for pin in checkouts.Checkout(str(ROOT)).pins() if not pin.marker]
    pins = [pin for pin in pins if not pin.startswith("torch==")]  # large, and looked at elsewhere
    command = [tmp_path / "venv" / "bin" / "python", "-m", "pip", "install", "--dry-run"]
    done = subprocess.run([*command, "--no-deps", *pins], capture_output=True, text=True)
    if "No network" in errors.why_pip_failed(done.stderr, "", ""):
        pytest.skip("no network")
    assert done.returncode == 0, errors.pip_errors(done.stderr)


@pytest.mark.slow
def test_without_a_network_set_up_says_so(checkout):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    environment.update(
        PIP_CONFIG_FILE=os.devnull, PIP_INDEX_URL="http://127.0.0.1:9/simple", PIP_RETRIES="0"
    )
    command = [checkout / "scripts" / "lab", "--no-browser"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 1
    assert done.stderr.startswith("No network") and "Traceback" not in done.stderr
    assert not (checkout / ".venv" / "setup.stamp").exists()


# ---- the libraries to compare with


third_party = load("_third_party")


@pytest.fixture
def with_third_party(checkout, monkeypatch):
    """A checkout, and the pip calls that _third_party makes in it; nothing is really installed."""
    calls = []
    monkeypatch.delenv("WORKBOOK_THIRD_PARTY", raising=False)
    monkeypatch.setattr(third_party._setup, "pip", lambda root, fd, what, *rest: calls.append(rest))
    return checkout, calls


def test_the_lock_marks_what_only_comparisons_need_so_that_pip_passes_over_it():
    marked = [name for name, (_, marker) in pins().items() if "extra" in str(marker)]
    assert {"deepspeed", "jax", "jaxlib", "torchft", "spmd-types", "sphinx",
            "myst-nb"} <= set(marked)
    assert not any(pins()[name][1].evaluate({"extra": ""}) for name in marked)
    held = checkouts.Checkout(str(ROOT))
    everybodys, others = ({canonicalize_name(pin.requirement.split("==")[0]) for pin in found}
                          for found in (held.pins(), held.third_party_pins()))
    assert set(marked) == others and not others & everybodys


def test_set_up_does_not_install_third_party_libraries(checkout, installed):
    setup.main(str(checkout))
    files = [Path(argument) for call in installed for argument in call if argument[-4:] == ".txt"]
    assert files and not any("deepspeed" in file.read_text() for file in files)


def test_third_party_libraries_are_installed_once_without_touching_torch(with_third_party):
    root, calls = with_third_party
    assert third_party.main(str(root)) == 0 and third_party.main(str(root)) == 0
    comparisons, book = calls
    assert "deepspeed==0.19.8" in comparisons and "--no-deps" in comparisons
    assert any(argument.startswith("sphinx-book-theme==") for argument in book)
    assert not [argument for argument in comparisons + book if argument.startswith("torch==")]


def test_the_book_installs_no_library_to_compare_with(with_third_party):
    root, calls = with_third_party
    assert third_party.main(str(root), "book") == 0
    assert [argument.split("==")[0] for argument in calls[0] if "==" in argument].count("myst-nb")
    assert len(calls) == 1 and not any("deepspeed" in argument for argument in calls[0])


@pytest.mark.parametrize(("system", "machine", "python", "there"), [
    ("linux", "x86_64", (3, 11, 2), True), ("linux", "aarch64", (3, 11, 2), False),
    ("darwin", "arm64", (3, 12, 0), False), ("linux", "x86_64", (3, 14, 0), False)])
def test_torchft_is_left_out_where_it_has_no_wheel(
        with_third_party, monkeypatch, system, machine, python, there):
    root, calls = with_third_party
    monkeypatch.setattr(third_party.sys, "platform", system)
    monkeypatch.setattr(third_party.platform, "machine", lambda: machine)
    monkeypatch.setattr(third_party.sys, "version_info", python)
    third_party.main(str(root))
    assert ("torchft==0.2.0" in calls[0]) == there and "jax==0.10.2" in calls[0]


def test_other_third_party_pins_in_the_lock_are_installed_again(with_third_party):
    root, calls = with_third_party
    third_party.main(str(root))
    lock = root / "requirements.lock"
    lock.write_text(lock.read_text().replace("deepspeed==0.19.8", "deepspeed==0.20.0"))
    third_party.main(str(root))
    assert "deepspeed==0.20.0" in calls[2] and len(calls) == 3  # the book's are still the same


def test_third_party_libraries_can_be_left_out(with_third_party, monkeypatch):
    root, calls = with_third_party
    monkeypatch.setenv("WORKBOOK_THIRD_PARTY", "0")
    assert third_party.main(str(root)) == 0 and not calls


@pytest.mark.parametrize(("wanted", "code"), [("", 0), ("1", 1)])
def test_third_party_libraries_that_cannot_be_had_are_one_sentence(
        with_third_party, monkeypatch, capsys, wanted, code):
    def fail(*_):
        raise errors.SetupError(errors.why_pip_failed("ProxyError", "DeepSpeed", "3.11") + ".")

    monkeypatch.setattr(third_party._setup, "pip", fail)
    monkeypatch.setenv("WORKBOOK_THIRD_PARTY", wanted)
    assert third_party.main(str(with_third_party[0]), "comparisons") == code
    said = capsys.readouterr().err
    assert said.startswith("No network") and said.count("\n") == 1
