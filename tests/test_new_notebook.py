"""scripts/new-notebook and scripts/new-exercise write skeletons that pass the builder and the tests
as they are."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NAME, PACKAGE = "97_smallest_example", "smallest_example"
TESTS = f"tests/{PACKAGE}"


@pytest.fixture
def tree(tmp_path):
    """A copy of this tree."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True,
                            capture_output=True, text=True).stdout.split("\n")
    for name in filter(None, listed):
        if (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def new(what, tree, *arguments):
    """Run new-notebook or new-exercise on a tree; return what became of it."""
    command = [sys.executable, ROOT / "scripts" / f"new-{what}", "--root", tree, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def run(tree, *command):
    """Run Python in a tree, with its labs and its scripts; fail with what it printed."""
    paths = [tree, tree / "scripts"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    environment.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run([sys.executable, *command], cwd=tree, env=environment, text=True,
                          capture_output=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def files(tree):
    return {path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_the_skeleton_passes_the_builder_and_the_tests(tree):
    done = new("notebook", tree, NAME, "--title", "The smallest example")
    assert done.returncode == 0, done.stderr
    run(tree, "-m", "ruff", "check", "labs", "scripts", "solutions", "tests")
    run(tree, "-m", "_build", "--root", tree, NAME)
    run(tree, "-m", "_build", "--root", tree, NAME, "--check")
    pytest = ("-m", "pytest", "-q", "-c", "pyproject.toml", "-p", "no:cacheprovider")
    run(tree, *pytest, TESTS, "tests/test_lazy_exports.py", "tests/test_layout.py")
    run(tree, *pytest, "tests/test_notebooks.py", "tests/test_glossary.py", "-k", NAME)


def test_it_names_what_it_wrote_and_what_comes_next(tree):
    before = files(tree)
    done = new("notebook", tree, NAME)
    written = files(tree) - before
    assert len(written) == 6 and set(done.stdout.split()) >= written
    assert f"scripts/build {NAME}" in done.stdout and TESTS in done.stdout
    assert "# # 97 · Smallest example" in (tree / "solutions" / f"{NAME}.py").read_text()
    assert not [path for path in written if "{{" in (tree / path).read_text()]


@pytest.mark.parametrize("taken", [
    "solutions/97_other.py", f"labs/{PACKAGE}/scaffold.py", f"labs/{PACKAGE}.py",
    f"tests/{PACKAGE}/test_largest_over_ranks.py"])
def test_it_overwrites_nothing(tree, taken):
    (tree / taken).parent.mkdir(exist_ok=True)
    (tree / taken).write_text("mine")
    before = files(tree)
    done = new("notebook", tree, NAME)
    assert done.returncode == 1 and files(tree) == before and (tree / taken).read_text() == "mine"
    assert "There is already" in done.stderr and "Nothing was written" in done.stderr


def test_a_number_with_a_letter_goes_on_with_the_exercises_of_the_one_before(tree):
    made = [new("notebook", tree, name) for name in ("97a_first", "97b_second")]
    assert [done.returncode for done in made] == [0, 0]
    first, second = ((tree / "solutions" / f"{name}.py").read_text()
                     for name in ("97a_first", "97b_second"))
    assert "# # 97a · First" in first and "### Exercise 97.1 ·" in first
    assert "# # 97b · Second" in second and "### Exercise 97.2 ·" in second


@pytest.mark.parametrize(("there", "wanted"), [
    ("97a_x", "97a_y"), ("97a_x", "97_y"), ("97_x", "97a_y")])
def test_a_number_is_given_once(tree, there, wanted):
    (tree / "solutions" / f"{there}.py").touch()
    done = new("notebook", tree, wanted)
    assert done.returncode == 1 and f"There is already solutions/{there}.py" in done.stderr


@pytest.mark.parametrize("arguments", [
    ["scaling"], ["6_scaling"], ["06-scaling"], ["06_Scaling"], ["06_import"], ["../06_scaling"],
    ["06ab_x"], ["06_scaling", "--title", 'a "quoted" one'], ["06_scaling", "--title", "x" * 61]])
def test_bad_arguments_are_one_sentence(tree, arguments):
    before = files(tree)
    done = new("notebook", tree, *arguments)
    sentence = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and sentence.startswith("scripts/new-notebook: error: ")
    assert files(tree) == before and "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("number", "notebook", "package"), [
    ("3.12", "03_zero_stages", "zero_stages"),
    ("7.29", "07a_tensor_parallel", "tensor_parallel")])
def test_a_new_exercise_passes_the_builder_and_the_tests(tree, number, notebook, package):
    before = files(tree)
    done = new("exercise", tree, number, "largest", "--title", "The largest of all ranks")
    assert done.returncode == 0, done.stderr
    written = {f"labs/{package}/largest.py", f"tests/{package}/test_largest.py"}
    assert files(tree) - before == written
    assert {f"labs/{package}/__init__.py", f"solutions/{notebook}.py"} < set(done.stdout.split())
    run(tree, "-m", "ruff", "check", "labs", "scripts", "solutions", "tests")
    run(tree, "-m", "_build", "--root", tree, notebook, "--no-execute")
    pytest = ("-m", "pytest", "-q", "-c", "pyproject.toml", "-p", "no:cacheprovider")
    run(tree, *pytest, f"tests/{package}/test_largest.py", "tests/test_lazy_exports.py")
    # All that needs no executed notebook: to build 03 takes minutes. The card's minutes are edited
    # by hand afterwards.
    run(tree, *pytest, "tests/test_notebooks.py", "tests/test_glossary.py", "-k",
        f"{notebook} and not solution_passes and not minutes_are")
    run(tree, *pytest, "tests/test_layout.py", "-k", f"{package} or upwards")


@pytest.mark.parametrize(("arguments", "sentence"), [
    (["3.10", "largest"], "03_zero_stages.py has an exercise 3.10 already; the next free one is "
                          "3.12"),
    (["99.1", "largest"], "There is no notebook 99: scripts/new-notebook makes one."),
    (["3.12", "prefetch"], "There is already labs/zero_stages/prefetch.py and "
                           "tests/zero_stages/test_prefetch.py: choose another name."),
    (["3-11", "largest"], "'3-11' is no number of an exercise"),
    (["3.12", "Largest"], "'Largest' is no name of a Python function"),
    (["3.12", "largest", "--title", "a {b}"], "a title is one line of at most 60 characters")])
def test_an_exercise_that_cannot_be_written_is_one_sentence(tree, arguments, sentence):
    before = {path: (tree / path).read_bytes() for path in files(tree)}
    done = new("exercise", tree, *arguments)
    assert done.returncode and sentence in done.stderr and "Traceback" not in done.stderr
    assert {path: (tree / path).read_bytes() for path in files(tree)} == before
