"""scripts/address: the repository's own address is said once, and stands where it belongs."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import _address
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "_address.py"
GITHUB = "https://github.com/owner/data-parallel-workbook"
FILES = ("pyproject.toml", "CITATION.cff", "README.md")


def run(*arguments, root: Path = ROOT) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, SCRIPT, "--root", root, *arguments],
                          capture_output=True, text=True, timeout=120)


@pytest.fixture
def tree(tmp_path):
    """A copy with one notebook, as it is before anybody has said the address."""
    for name in FILES:
        shutil.copy(ROOT / name, tmp_path / name)
    for folder in ("solutions", "notebooks"):
        (tmp_path / folder).mkdir()
    (tmp_path / "solutions" / "scripts").symlink_to(ROOT / "solutions" / "scripts")
    for suffix in ("py", "ipynb"):
        shutil.copy(ROOT / "solutions" / f"00_start_here.{suffix}", tmp_path / "solutions")
    _address.write(tmp_path, None)
    return tmp_path


def texts(tree: Path) -> dict[str, str]:
    return {path.relative_to(tree).as_posix(): path.read_text()
            for path in (*map(tree.joinpath, FILES), *tree.glob("*/*.ipynb"))}


def test_until_it_is_said_one_sentence_says_so(tree):
    assert _address.address(tree) is None and _address.open_links(_address.address(tree)) == {}
    done = run("--show", root=tree)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"{_address.MISSING}\n")
    assert "./scripts/address https://" in _address.MISSING


def test_an_address_stands_where_it_belongs(tree):
    before = texts(tree)
    done = run(GITHUB + ".git", root=tree)
    assert done.returncode == 0 and f"The address is {GITHUB}." in done.stdout, done
    assert run("--show", root=tree).stdout.strip() == GITHUB == _address.address(tree)
    now = texts(tree)
    project = tomllib.loads(now["pyproject.toml"])["project"]
    assert project["urls"] == {"Repository": GITHUB} and "jax" in project["optional-dependencies"]
    assert yaml.safe_load(now["CITATION.cff"])["repository-code"] == GITHUB
    for folder in ("notebooks", "solutions"):
        assert f'address, said = \\"{GITHUB}\\"' in now[f"{folder}/00_start_here.ipynb"]
    links = _address.open_links(_address.address(tree))
    assert set(links) == {"Colab", "Kaggle", "Codespaces"}
    assert all(f"[![Open in {name}](" in now["README.md"] for name in links)
    assert all(f"]({link})\n" in now["README.md"] for link in links.values())
    # again, then another one, then none
    assert "That is how it was before" in run(GITHUB, root=tree).stdout and texts(tree) == now
    other = GITHUB.replace("owner", "another")
    run(other, root=tree)
    assert not [name for name, text in texts(tree).items() if f"{GITHUB}\"" in text]
    assert run("--remove", root=tree).returncode == 0
    without = texts(tree)
    assert not [name for name, text in without.items() if "another" in text.replace("another ", "")
                and other in text]
    assert {name: without[name] for name in FILES} == {name: before[name] for name in FILES}


def test_another_host_gets_no_links_that_only_github_has(tree):
    for address in ("https://gitlab.com/group/sub/workbook", "file:///srv/git/workbook"):
        _address.write(tree, address)
        assert _address.address(tree) == address and _address.open_links(address) == {}
        assert "Open in Colab" not in (tree / "README.md").read_text()
    # CFF knows addresses of the web alone
    assert "repository-code" not in yaml.safe_load((tree / "CITATION.cff").read_text())


@pytest.mark.parametrize("text", [
    "workbook", "github.com/owner/repository", "http://github.com/owner/repository",
    "https://github.com", "https://github.com/", "https://localhost/x y", "https://github.com/a\"b/c",
    "https://github.com/owner/repository?tab=readme", "git@github.com:owner/repository", "file:/a",
    "https://github.com/owner/repo/#readme"])
def test_what_is_no_address_is_refused_and_nothing_written(text):
    with pytest.raises(SystemExit, match="is no address of a repository"):
        _address.cleaned(text)


def test_a_password_is_refused_and_not_repeated():
    with pytest.raises(SystemExit, match="before @") as refused:
        _address.cleaned("https://me:secret@github.com/owner/repository")
    assert "secret" not in str(refused.value)


def test_an_address_is_kept_as_short_as_git_and_browsers_take_it():
    assert _address.cleaned("https://host.org/a/b.git/") == "https://host.org/a/b"
    assert _address.cleaned("file:///srv/workbook.git") == "file:///srv/workbook.git"


@pytest.mark.parametrize("arguments", [(), ("--show", "--remove"), (GITHUB, "--show")])
def test_one_thing_at_a_time_is_asked_for(arguments):
    done = run(*arguments)
    assert done.returncode == 2 and "give one of: an address, --show, --remove" in done.stderr


def test_the_citation_is_valid_and_says_what_the_project_says():
    """By the rules of CFF 1.2: what must be there, what an author is, what a licence is called."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"cff-version", "message", "title", "authors"} <= set(cited) <= {
        "cff-version", "message", "type", "title", "abstract", "authors", "version", "license",
        "keywords", "repository-code"}
    assert cited["cff-version"] == "1.2.0" and cited["type"] == "software"
    assert cited["version"] == project["version"]
    # the package is code; text and pictures have a licence of their own
    assert cited["license"] == [project["license"], "CC-BY-4.0"]
    assert cited["abstract"] == project["description"]
    holder = re.search(r"Copyright \(c\) \d+ (.+)", (ROOT / "LICENSE").read_text())[1]
    assert cited["authors"] == [{"name": holder}]
    assert (ROOT / "README.md").read_text().startswith(f"# {cited['title']}\n")
    json.dumps(cited)  # nothing that YAML would take for a date
