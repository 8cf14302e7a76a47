"""On a machine with GPUs: every check of every solution, on its GPUs."""

import ast
import importlib
import re
from pathlib import Path

import _notebooks
import pytest
from _build.definitions import definitions

from labs.training.presets import preset
from labs.workers import devices

SOLUTIONS = _notebooks.paths(Path(__file__).resolve().parents[1] / "solutions")


def checks_of(path) -> list[ast.Call]:
    """The calls of checks in a notebook's source; but for 0.5's, whose script chooses a device."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return [call for call in calls if ast.unparse(call.func).startswith("lab.check_")
            and ast.unparse(call.func) != "lab.check_script"]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("path", SOLUTIONS, ids=lambda path: path.stem)
def test_a_solution_passes_every_check_on_the_gpus(path, nothing_left):
    solution = definitions(path.stem, PRESET=preset(), RANKS=4)
    lab = importlib.import_module(f"labs.{_notebooks.package(path.stem)}")
    names = {"lab": lab, **vars(solution)}
    for call in checks_of(path):
        call.keywords.append(ast.keyword("device", ast.Constant("cuda")))
        verdict = eval(ast.unparse(call), names)
        assert verdict.passed, verdict


@pytest.mark.parametrize("path", SOLUTIONS, ids=lambda path: path.stem)
def test_the_checks_of_a_solution_are_found(path):
    named = set(re.findall(r"^lab\.check_\w+", path.read_text(), re.MULTILINE))
    named.discard("lab.check_script")
    assert named and len(checks_of(path)) >= len(named)


def test_launches_in_a_block_run_where_it_says(monkeypatch):
    monkeypatch.setattr(devices.cuda, "count", lambda: 2)
    assert (devices.gpus(), devices.plan(2).devices) == (2, ("cuda:0", "cuda:1"))
    assert devices.are_shared(3) and not devices.are_shared(2)
    with devices.on("cpu"):
        assert (devices.gpus(), preset().name) == (0, "laptop")
        assert devices.plan(2).devices == ("cpu", "cpu") and not devices.are_shared(3)
        assert devices.plan(2, "cuda").backend == "cpu:gloo,cuda:nccl"
        with devices.on(None):
            assert devices.gpus() == 2
    assert preset().name == "node"
    with pytest.raises(ValueError, match="device='tpu': choose 'cpu', 'cuda'"):
        with devices.on("tpu"):
            pass
