"""What a later notebook takes out of an earlier one's file."""

import nbformat
import pytest

from labs.checks import previous_work
from labs.checks.verdicts import Wrong

MINE = """def mine(model, optimizer_class, **settings):
    return model, optimizer_class(model.parameters(), eps=tiny, **settings)"""


@pytest.fixture
def student(tmp_path, monkeypatch):
    """Writes the cells of a student's 03_zero_stages.ipynb into the working folder."""
    monkeypatch.chdir(tmp_path)

    def write(*sources):
        cells = [nbformat.v4.new_markdown_cell("# no code: 1/0"),
                 *map(nbformat.v4.new_code_cell, sources)]
        nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "03_zero_stages.ipynb")

    return write


def take(name="zero3", check=lambda strategy: "fine"):
    return previous_work.previous_strategy("03_zero_stages", name, "3.4", check)


def refuses(error):
    def check(_):
        raise error
    return check


def test_definitions_come_without_what_the_notebook_runs(student):
    student("import math\ntiny = 1e-6\nstarted = open('/nowhere')", "%%time\n1 / 0", "def half(",
            "%%writefile train.py\ndef scripted():\n    pass",
            "lab.check_it(1)\n1 / 0", MINE, "class Late(dict):\n    size = math.pi")
    found = previous_work.definitions(previous_work.Path("03_zero_stages.ipynb"))
    assert found.mine.__globals__["tiny"] == 1e-6 and found.Late.size > 3
    assert not hasattr(found, "started") and not hasattr(found, "half")
    assert not hasattr(found, "scripted")


def test_values_stand_in_for_what_is_assigned(student):
    student("SIZE = 1 / 0\nother = 3")
    assert previous_work.definitions(previous_work.Path("03_zero_stages.ipynb"), SIZE=2).SIZE == 2


def test_the_students_own_strategy_is_taken(student):
    student("tiny = 1e-6", MINE.replace("mine", "zero3"))
    found = take()
    assert found.is_students and "tiny" in found.strategy.__globals__
    assert repr(found) == ("✓ Exercise 3.4  your zero3 from 03_zero_stages.ipynb, as it was last "
                           "saved: fine")
    assert found._repr_html_().startswith("<div")


@pytest.mark.parametrize(("error", "sentence"), [
    (NotImplementedError("Exercise 3.4"), "is waiting for your code"),
    (NotImplementedError("Exercise 3.3"), "waits for Exercise 3.3"),
    (Wrong("rank 1 holds too much", code="wrong"),
     "does not pass its check: rank 1 holds too much")])
def test_the_worked_answer_stands_in_and_it_says_why(student, error, sentence):
    student(MINE.replace("mine", "zero3"))
    found = take(check=refuses(error))
    assert not found.is_students and found.strategy.__globals__["__name__"] == "__main__"
    assert "ZeRO3" in found.strategy.__globals__ and repr(found).endswith(sentence)
    assert repr(found).startswith("○ Exercise 3.4  the worked zero3: yours in 03_zero_stages.ipynb")


def test_a_notebook_without_it_and_a_folder_without_the_notebook(student, monkeypatch, tmp_path):
    student("unused = 1")
    assert "03_zero_stages.ipynb, as it was last saved, defines none" in repr(take())
    (tmp_path / "03_zero_stages.ipynb").unlink()
    monkeypatch.setattr(previous_work, "STUDENTS", tmp_path / "nowhere")
    assert "there is no notebook with yours here" in repr(take())


def test_a_definition_that_fails_is_the_students_to_mend(student):
    student("def zero3():\n    pass", "class Later(unknown):\n    pass")
    assert "NameError: name 'unknown' is not defined" in repr(take())


def test_a_file_that_is_no_notebook(student, tmp_path):
    (tmp_path / "03_zero_stages.ipynb").write_text("half a noteb")
    assert "cannot be read as a notebook" in repr(take())
