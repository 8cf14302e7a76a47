"""Right answers to four exercises in many styles (tests/grade/honest): each passes, and none is
flagged."""

import json

import pytest
from _grade.outcomes import PASSED
from _grade.sandbox import Sandbox
from grading import ROOT, grade_one, looked_at, needs_namespaces
from honest import combine, mean_over_ranks, mixed, rank_states

OF = {"2.1": ("02_manual_ddp", "combine", combine), "0.1": ("00_start_here", "mean_over_ranks",
                                                            mean_over_ranks),
      "1.7": ("01_memory_math", "rank_states", rank_states), "4.5": ("04_fsdp", "mixed", mixed)}
SAMPLE = {("2.1", "lerp"), ("2.1", "dataclass_"), ("0.1", "functional")}  # the others are slow


@pytest.fixture(scope="module")
def sandbox():
    found = Sandbox(["labs.start_here", "labs.manual_ddp", "labs.memory_math", "labs.fsdp"],
                    seconds=120)
    yield found
    found.close()


def handed_in(number, name, path):
    """A submission with this answer in the place of the gap, and its helpers in a cell before."""
    lesson, function, answers = OF[number]
    helper, source = answers.ANSWERS[name]
    nb = json.loads((ROOT / "notebooks" / f"{lesson}.ipynb").read_text())
    at = next(at for at, cell in enumerate(nb["cells"]) if cell["cell_type"] == "code"
              and f"def {function}(" in "".join(cell["source"]))
    nb["cells"][at]["source"] = source
    if helper:
        nb["cells"].insert(at, {"cell_type": "code", "id": "helper", "metadata": {}, "outputs": [],
                                "source": helper, "execution_count": None})
    path.write_text(json.dumps(nb))


@needs_namespaces
@pytest.mark.parametrize(("number", "name"), [
    pytest.param(number, name, marks=[pytest.mark.slow] * ((number, name) not in SAMPLE))
    for number, (*_, answers) in OF.items() for name in answers.ANSWERS])
def test_an_honest_answer_passes(sandbox, lessons, tmp_path, number, name):
    handed_in(number, name, tmp_path / "ada.ipynb")
    one = looked_at(tmp_path / "ada.ipynb", lessons)
    found = grade_one(sandbox, one, next(each for each in one.lesson.exercises
                                         if each.number == number))
    assert found.outcome == PASSED, found
