"""scripts/release: an archive for students works, has no answers, and each class has numbers of its
own."""

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml
from _build.source import read_source
from _build.student import secrets, tokens
from _release import archive
from _release.__main__ import check

ROOT = Path(__file__).resolve().parents[1]
FIRST_CHECK = """\
import json
notebook = json.load(open("notebooks/02_manual_ddp.ipynb"))
cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
number = next(number for number, cell in enumerate(cells) if "lab.check_" in cell)
names = {}
for cell in cells[:number]:
    if "import labs" in cell and "def " not in cell:
        exec(cell, names)
names["lab"] = __import__("labs.manual_ddp").manual_ddp
exec("def combine(gradients, sizes):\\n"
     "    used = [(g, s) for g, s in zip(gradients, sizes) if g is not None]\\n"
     "    return sum(g * (s / sum(sizes)) for g, s in used)\\n"
     "verdict = lab.check_combine(combine)", names)
print(names["verdict"])
"""


def is_repository() -> bool:
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True)
    return done.returncode == 0


pytestmark = pytest.mark.skipif(not is_repository(), reason="this is no git repository")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(folder of the unpacked archive of a variant, paths of the archives)."""
    folder = tmp_path_factory.mktemp("release")
    paths = archive.write(ROOT, "v0", "autumn", folder / "dist")
    with tarfile.open(paths[0]) as tar:
        tar.extractall(folder, filter="data")
    return folder / "workbook-v0-autumn", paths


def in_archive(folder, code, **environment):
    """What Python prints there."""
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True,
                          timeout=300, env={**os.environ, "PYTHONPATH": str(folder), **environment})
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_it_has_no_answers(made):
    folder, _ = made
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*")
             if path.is_file()}
    assert not [name for name in files
                if re.match(r"(solutions|tests|book|experiments/reference/(laptop|h200))/", name)]
    for name in files:
        if name.endswith(".ipynb"):
            cells = json.loads(files[name].read_text())["cells"]
            assert not any(cell.get("outputs") for cell in cells), name
        if name.endswith((".py", ".ipynb", ".md")):
            assert "### BEGIN SOLUTION" not in files[name].read_text(), name
    for path in sorted((ROOT / "solutions").glob("0*.py")):
        cells = json.loads(files[f"notebooks/{path.stem}.ipynb"].read_text())["cells"]
        text = tokens("\n".join("".join(cell["source"]) for cell in cells))
        lines = secrets(read_source(path, path.stem)[0])
        assert lines and not [line for line in lines if f" {line} " in text], path


def test_both_archives_hold_the_same(made):
    folder, (_, zipped) = made
    with zipfile.ZipFile(zipped) as packed:
        found = {info.filename.split("/", 1)[1]: packed.read(info) for info in packed.infolist()}
        assert found == {path.relative_to(folder).as_posix(): path.read_bytes()
                         for path in folder.rglob("*") if path.is_file()}
        lab = packed.getinfo(f"{folder.name}/scripts/lab")
        assert lab.external_attr >> 16 & 0o111 and (folder / "scripts/lab").stat().st_mode & 0o100


def test_the_same_commit_gives_the_same_bytes(made, tmp_path):
    again = archive.write(ROOT, "v0", "autumn", tmp_path)
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in made[1]]


@pytest.mark.slow
def test_a_check_runs_in_it(made):
    assert "✓ Exercise 2.1" in in_archive(made[0], FIRST_CHECK)


@pytest.mark.slow
def test_its_commands_answer_and_work_is_filled(made, tmp_path):
    folder, _ = made
    for name in ("lab", "plan", "preflight", "work"):
        done = subprocess.run([folder / "scripts" / name, "--help"], capture_output=True, text=True,
                              timeout=60)
        assert done.returncode == 0 and "sage: " in done.stdout, (name, done.stderr)
    subprocess.run([folder / "scripts" / "work", "--to", tmp_path / "work"], check=True,
                   capture_output=True)
    assert len(list((tmp_path / "work").glob("*.ipynb"))) == 13
    said = in_archive(folder, "import _preflight.table, _plan.asked, _setup\n"
                      "from _preflight import notebooks\nprint(notebooks.running().value)",
                      PYTHONPATH=f"{folder}:{folder / 'scripts'}")
    assert said.startswith("13 notebooks; how long they take")


@pytest.mark.slow
def test_each_variant_has_its_own_numbers(made):
    code = ("from labs.training import data\nfrom labs.checks.generator import new_generator\n"
            "print(data.windows(1, 8).tolist(), new_generator().random())\n"
            "from labs.scaling import show_release_note\nprint(show_release_note())")
    folder, _ = made
    assert (folder / archive.VARIANT).read_text() == "autumn\n"
    found = [in_archive(place, code, WORKBOOK_SEED="1") for place in (folder, folder, ROOT)]
    assert found[0] == found[1] and found[0] != found[2]
    assert found[0].split("]]")[1] != found[2].split("]]")[1]
    assert found[0].splitlines()[1] != found[2].splitlines()[1]  # the figure of exercise 6.3


@pytest.mark.slow
def test_what_needs_an_earlier_answer_says_which(made):
    code = ("from labs.checks import previous_work, verdicts\n"
            "try:\n    previous_work.previous_strategy('03_zero_stages', 'zero3', '3.4', str)\n"
            "except verdicts.Wrong as error:\n    print(error, error.hint)")
    said = in_archive(made[0], code)
    assert "needs your zero3 of 03_zero_stages" in said and "Pass exercise 3.4 first" in said


def test_the_changelog_has_what_changed_for_students(tmp_path):
    def git(*arguments):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@x", *arguments],
                       cwd=tmp_path, check=True, capture_output=True)

    def commit(name, subject):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(subject)
        git("add", "-A")
        git("commit", "-qm", subject)

    git("init", "-q")
    commit("labs/a.py", "the beginning")
    assert archive.changelog(tmp_path, "v1") == "# v1\n\nThe first release.\n"
    git("tag", "v1")
    commit("labs/a.py", "a clearer hint")
    commit("solutions/a.py", "an answer")
    assert archive.changelog(tmp_path, "v2") == "# v2\n\nSince v1:\n\n- a clearer hint\n"
    with pytest.raises(archive.ReleaseError, match="the tag v1 is another commit's"):
        archive.add_tag(tmp_path, "v1")


@pytest.mark.parametrize("arguments", [["../x"], ["v1", "--variant", "a b"], ["-v"], []])
def test_arguments(arguments):
    with pytest.raises(SystemExit) as exit_:
        check(arguments)
    assert exit_.value.code == 2


def test_who_cites_finds_what_it_needs():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = (ROOT / "pyproject.toml").read_text()
    assert cited["cff-version"] == "1.2.0" and cited["license"] == ["MIT", "CC-BY-4.0"]
    assert {"message", "title", "authors", "abstract", "type", "keywords"} <= cited.keys()
    assert f'version = "{cited["version"]}"' in project
    for page in ("README.md", "scripts/_release/README.students.md"):
        assert "CC BY 4.0" in (ROOT / page).read_text()
    assert "creativecommons.org/licenses/by/4.0/legalcode" in (ROOT / "LICENSE-text.md").read_text()
