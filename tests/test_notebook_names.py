"""Names and numbers of notebooks, also of those that share their two digits: 07a and 07b."""

from pathlib import Path

import _notebooks
import pytest

NAMES = ["06_scaling", "07a_tensor_parallel", "07b_pipeline_parallel", "08_failure"]


@pytest.mark.parametrize(("name", "number"), [
    ("06_scaling", "06"), ("07a_tensor_parallel", "07a"), ("7_x", ""), ("07ab_x", ""),
    ("07A_x", ""), ("007_x", ""), ("notes_07", ""), ("03_x.old-1", ""), ("07a", "")])
def test_the_number_of_a_name(name, number):
    assert _notebooks.number(name) == number


def test_the_package_of_a_name():
    assert [_notebooks.package(name) for name in NAMES] == [
        "scaling", "tensor_parallel", "pipeline_parallel", "failure"]


def test_notebooks_of_a_folder_come_in_their_order(tmp_path):
    for name in [*reversed(NAMES), "notes"]:
        (tmp_path / f"{name}.py").touch()
        (tmp_path / f"{name}.ipynb").touch()
    (tmp_path / "07a_tensor_parallel.old-1.ipynb").touch()
    assert [path.name for path in _notebooks.paths(tmp_path)] == [f"{name}.py" for name in NAMES]
    assert [path.stem for path in _notebooks.paths(tmp_path, ".ipynb")] == NAMES


@pytest.mark.parametrize(("wanted", "found"), [
    ("07", NAMES[1:3]), ("07a", NAMES[1:2]), ("06", NAMES[:1]), ("7", []), ("0", []), ("07c", []),
    ("08a", []), ("07b_pipeline_parallel", NAMES[2:3]), ("", []),
    ("solutions/07a_tensor_parallel.py", NAMES[1:2]), (Path("work/06_scaling.ipynb"), NAMES[:1])])
def test_what_is_chosen(wanted, found):
    assert _notebooks.chosen(wanted, NAMES) == found
