"""What stands in every notebook and in its solution. scripts/test runs both, too: nbval holds what
each check of a solution says against what is read here; nbclient, and the browser test, hold what
an untouched notebook says against `untouched`.
"""

import itertools
import re
import tomllib
from pathlib import Path

import _notebooks
import nbformat
import pytest
import untouched
from _build import card, execute, minutes
from _build.exercises import exercises
from _build.notebook import set_ids
from _build.source import read_source
from _build.student import exercise_number, is_guess, secrets, tokens
from _unattended import reference

ROOT = Path(__file__).resolve().parents[1]
NAMES = [path.stem for path in _notebooks.paths(ROOT / "solutions")]
README = (ROOT / "README.md").read_text()
FIRST_PAGE = (ROOT / "book" / "index.md").read_text()  # of the book; its table has the notebooks
HEADING = re.compile(r"^### Exercise (\d+\.\d+) · .+$", re.MULTILINE)
TARGET = re.compile(r"\s*^\*Difficulty ([1-5]) of 5 · \d+ minutes?(?: · \d+ points?)? · target: "
                    r"[^*]+\*$", re.MULTILINE)
HINT = re.compile(r"<details>\s*<summary>.*?</summary>\n\n.+?\n\n</details>", re.DOTALL)
CHECK = re.compile(r"^lab\.check_", re.MULTILINE)
A_LAB = 180  # minutes: 2 × 90
FEWEST, MOST = 5, 25  # lines that a student writes in an obligatory exercise, guesses apart
# Exercises that are allowed fewer or more lines -> why.
OTHER_LENGTHS = {"4.4": "one loop over the blocks, and that is all of checkpointing",
                 "6.1": "a complete script, with its options"}
STATIC = {"text/plain", "text/html", "image/png"}
ACTIVE = re.compile(r"<script|<iframe|<object|<embed|<link|\son\w+\s*=|javascript:", re.IGNORECASE)
OPAQUE = re.compile(r"^<[\w.]+ object at|^<Figure |^\w*(?:Box|Slider|Dropdown|Output)\(")


def outputs(notebook):
    """(cell's source, text of its outputs) of every code cell."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            texts = [output.get("text") or output.get("data", {}).get("text/plain", "")
                     for output in cell.outputs]
            yield cell.source, "\n".join(texts)


def errors(notebook):
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"
            for output in cell.outputs if output.output_type == "error"]


@pytest.mark.parametrize(("source", "output"), [
    ("%nomagic", {"output_type": "stream", "name": "stderr", "text": "UsageError: %nomagic"}),
    ("1 / 0", {"output_type": "stream", "name": "stdout", "text": "Traceback (most recent ..."}),
    ("lab.check_mean(mean)", {"output_type": "execute_result", "data": {
        "text/plain": "✓ Exercise 0.1  all is well"}}),
    ("lab.check_mean(mean)", {"output_type": "execute_result", "data": {
        "text/plain": "✗ Exercise 0.1  rank 1 has another"}})])
def test_what_an_untouched_notebook_may_not_say(source, output):
    with pytest.raises(AssertionError):
        untouched.judge(source, [nbformat.from_dict(output)])


def test_what_an_untouched_notebook_says():
    for source, text in (("lab.check_mean(mean)", "○ Exercise 0.1  is waiting for your code"),
                         ("print(1)", "1")):
        untouched.judge(source, [nbformat.from_dict({
            "output_type": "execute_result", "data": {"text/plain": text}})])


@pytest.mark.parametrize("name", NAMES)
def test_a_solution_passes_every_check(name):
    notebook = nbformat.read(ROOT / "solutions" / f"{name}.ipynb", as_version=4)
    compared = [cell.source for cell in notebook.cells if
                "nbval-check-output" in cell.metadata.get("tags", [])]
    checks = [(source, text) for source, text in outputs(notebook) if CHECK.search(source)]
    assert checks and not errors(notebook)
    assert [source for source, text in checks if "✓ Exercise" not in text] == []
    assert {source for source, _ in checks} <= set(compared)
    everything = "\n".join(text for _, text in outputs(notebook))
    assert "is waiting" not in everything and "no guess yet" not in everything
    # scripts/solutions takes a rejected answer for a failed notebook. run_jax is no check.
    assert not re.search("^✗ (?!run_jax)", everything, re.MULTILINE)


@pytest.mark.parametrize("name", NAMES)
def test_a_solution_is_read_without_javascript(name):
    """As GitHub and nbviewer show it, which run no script and take styles away: what an output says
    stands in a text, a table or a picture, also beside what is interactive in JupyterLab."""
    path = ROOT / "solutions" / f"{name}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    assert not [problem for cell in notebook.cells for problem in not_static(cell)]
    assert path.stat().st_size < 2_000_000  # larger ones GitHub may not show


def not_static(cell):
    """Yields what of a cell a page without JavaScript cannot show."""
    for page in [cell.source] if cell.cell_type == "markdown" else []:
        yield from ACTIVE.findall(page)
    for output in cell.get("outputs", []):
        data = output.get("data", {"text/plain": output.get("text", "")})
        yield from set(data) - STATIC
        yield from ACTIVE.findall(data.get("text/html", ""))
        words = re.sub(r"<[^>]+>", "", data.get("text/html", ""))
        text = data.get("text/plain", "" if "image/png" in data else words)
        if not text.strip() or execute.NO_PICTURE in text or OPAQUE.search(text):
            yield f"{cell.id}: {text[:60]!r}"
        if "text/html" in data and not words.strip():
            yield f"{cell.id}: HTML without a text"


@pytest.mark.parametrize("data", [
    {execute.WIDGET: {"model_id": "1"}}, {execute.WIDGET: {}, "text/plain": "IntSlider(value=3)"},
    {"text/plain": execute.NO_PICTURE}, {"text/plain": "<labs.Picture object at 0x7f>"},
    {"text/plain": "a", "text/html": "<p onclick='x()'>a</p>"},
    {"text/plain": "a", "text/html": "<div id='plot'></div>"},
    {"text/plain": "a", "text/html": "b<script>draw()</script>"}, {"image/png": "iVBO"}])
def test_an_output_that_needs_javascript_is_found(data):
    output = nbformat.v4.new_output("display_data", data)
    assert list(not_static(nbformat.v4.new_code_cell("x", outputs=[output])))


@pytest.mark.parametrize("name", NAMES)
def test_minutes_and_dollars_of_execution_come_from_reference_runs(name):
    """The builder writes them (tests/test_build.py), so nobody else does."""
    source = (ROOT / "solutions" / f"{name}.py").read_text()
    header = source.split("\n# %%")[0]
    assert "$" not in header and "of compute" not in header and "Run All" not in header
    student = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    assert student.cells[0].source.count(card.row_of(name, ROOT)) == 1


def test_badges_say_what_is_so():
    badges = dict(re.findall(r"^!\[([^\]]+)\]\(https://img\.shields\.io/badge/([^)]+)\)$", README,
                             re.MULTILINE))
    for words, path in badges.items():  # the picture says what its words say
        assert re.sub(r"\W", "", words) == re.sub(r"-[0-9a-f]{6}$|[_\W]", "", path)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    torch = re.search(r"torch>=(\S+?)\"", (ROOT / "pyproject.toml").read_text())[1]
    runs = {bool(run["machine"]["gpus"]): reference.seconds(run) for run in reference.runs(ROOT)}
    assert list(badges) == [
        f"Python {project['requires-python'].strip('>=')} or newer", f"torch {torch} or newer",
        *(f"{name}: {len(runs[gpus])} of {len(NAMES)} notebooks pass" if gpus in runs else
          f"{name}: notebooks not yet measured" for name, gpus in (("CPU", False), ("GPU", True))),
        f"Licence: {project['license']}", "Text: CC BY 4.0"]


def test_the_book_has_one_row_for_every_notebook():
    rows = re.findall(rf"^\| \[({_notebooks.NUMBER}) (.+)$", FIRST_PAGE, re.MULTILINE)
    found = [number for number, row in rows if "*(coming)*" not in row]
    assert found == list(map(_notebooks.number, NAMES))


@pytest.mark.parametrize("name", NAMES)
def test_minutes_are_those_of_the_rule(name):
    """Of the title, the sittings, the book's table. `scripts/build --minutes` prints the rule's."""
    cells, _ = read_source(ROOT / "solutions" / f"{name}.py", name)
    set_ids(cells, name)
    parts = minutes.sittings(cells, ROOT / "solutions" / f"{name}.ipynb",
                             minutes.measured_waiting(name, ROOT))
    total, number, each, optional = minutes.TIME.search(cells[0].source).groups()
    each = [int(said) for said in (each or total).split(" + ")]
    assert (number, len(each)) == ((None, "two", "three")[len(parts) - 1], len(parts))
    assert sum(each) == int(total) and max(each) <= A_LAB
    text = "\n".join(cell.source for cell in cells if cell.kind == "markdown")
    assert [int(said) for said in minutes.SITTING.findall(text)] == each[1:]
    assert each == [pytest.approx(part.core.minutes, abs=5) for part in parts]
    assert int(optional or 0) == pytest.approx(sum(part.optional.minutes for part in parts), abs=5)
    for row in re.findall(rf"^\| \[{_notebooks.number(name)} .+$", FIRST_PAGE, re.MULTILINE):
        assert row.split("|")[3].strip() == total


@pytest.mark.parametrize("name", NAMES)
def test_headings_make_an_outline(name):
    """The rules of jupyterlab-a11y-checker on headings: one title, no level left out, none empty,
    no section twice; and every image in a text has its words."""
    cells, _ = read_source(ROOT / "solutions" / f"{name}.py", name)
    text = "\n\n".join(cell.source for cell in cells if cell.kind == "markdown")
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    found = [(len(marks), words.strip())
             for marks, words in re.findall(r"^(#+)(.*)$", text, re.MULTILINE)]
    levels = [level for level, _ in found]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert all(words for _, words in found)
    sections = [words for level, words in found if level <= 2]
    assert len(set(sections)) == len(sections)
    assert not re.search(r"!\[\]|<img(?![^>]*\balt=)", text)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_has_few_names_of_our_own(name):
    """What torch has is used under torch's name."""
    cells, _ = read_source(ROOT / "solutions" / f"{name}.py", name)
    assert len(minutes.other_names(cells)) <= 15


@pytest.mark.parametrize("name", NAMES)
def test_no_answer_is_in_a_students_notebook(name):
    """Not in its cells, ids, metadata or outputs: of the file itself, as it is handed out."""
    cells, problems = read_source(ROOT / "solutions" / f"{name}.py", name)
    file = (ROOT / "notebooks" / f"{name}.ipynb").read_text()
    student = nbformat.reads(file, as_version=4)
    assert not problems and not any(cell.get("outputs") for cell in student.cells)
    found = secrets_in(cells, [file, *(cell.source for cell in student.cells)])
    assert secrets(cells) and not found


def test_an_answer_in_a_students_notebook_is_found():
    cells, _ = read_source(ROOT / "solutions" / "02_manual_ddp.py", "02")
    assert secrets_in(cells, ["# your code here", "  total,  combined = sum(sizes),0"]) == [
        "total, combined = sum(sizes), 0"]


def secrets_in(cells, texts):
    """The lines of solutions that stand in one of the texts."""
    shown = " ".join(tokens(text) for text in texts)
    return [line for secret, (_, line) in secrets(cells).items() if f" {secret} " in shown]


def lengths(cells):
    """Number -> lines in the gaps, of each obligatory exercise that has a gap. A guess is none."""
    found = {exercise.number: 0 for exercise in exercises(cells)
             if exercise.answers and not exercise.optional}
    for cell in cells:
        number = exercise_number(cells, cell, len(cell.lines)) if cell.regions else None
        if number in found:
            found[number] += sum(len(region.code) for region in cell.regions
                                 if not is_guess(cell, region))
    return found


def test_an_obligatory_exercise_is_neither_a_call_nor_a_program():
    """What one or two lines answer is a prediction, or a part of another exercise. An exercise that
    has been lengthened, or that is gone, is taken out of the list of exceptions."""
    found = {}
    for name in NAMES:
        cells, _ = read_source(ROOT / "solutions" / f"{name}.py", name)
        found |= lengths(cells)
    others = {number: lines for number, lines in found.items() if not FEWEST <= lines <= MOST}
    unexpected = set(others) ^ set(OTHER_LENGTHS)
    assert found and {number: others.get(number) for number in unexpected} == {}


def test_no_two_exercises_have_one_number():
    """Also those of 07a to 07d: a table of grades has a column for each number."""
    numbers = [number for name in NAMES for number in re.findall(
        r"^# ### Exercise (\d+\.\d+) ·", (ROOT / "solutions" / f"{name}.py").read_text(), re.M)]
    assert numbers and len(numbers) == len(set(numbers))


@pytest.mark.parametrize("name", NAMES)
def test_every_exercise_is_checked(name):
    student = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    source = "\n".join(cell.source for cell in student.cells)
    folder = ROOT / "tests" / name.split("_", 1)[1]
    for exercise in set(re.findall(r"lab\.check_(\w+)", source)):
        tests = (folder / f"test_{exercise}.py").read_text(encoding="utf-8")
        assert f"check_{exercise}" in tests, f"check_{exercise} has no wrong answers"


@pytest.mark.parametrize("name", NAMES)
def test_every_exercise_has_its_heading_its_target_and_its_hint(name):
    """The heading puts it into the table of contents; the line below says how hard it is, how long
    it takes and what the check measures; from difficulty 3 on a folded hint follows the gap."""
    student = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    text = "\n\n".join(cell.source for cell in student.cells if cell.cell_type == "markdown")
    parts = HEADING.split(text)
    after = dict(zip(parts[1::2], parts[2::2], strict=True))
    code = "\n".join(cell.source for cell in student.cells if cell.cell_type == "code")
    numbers = set(re.findall(r"^# Exercise (\d+\.\d+)", code, re.MULTILINE))
    assert numbers == set(after), "exercises without a heading, or headings without an exercise"
    found = {number: TARGET.match(below) for number, below in after.items()}
    assert [number for number, line in found.items() if not line] == []
    hard = [number for number, line in found.items() if int(line[1]) >= 3]
    assert [number for number in hard if not HINT.search(after[number])] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_link_to_a_file_leads_to_a_file(name):
    """Seen from notebooks/ and from solutions/, and so from work/, where students' copies are."""
    for folder in ("notebooks", "solutions"):
        notebook = nbformat.read(ROOT / folder / f"{name}.ipynb", as_version=4)
        text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
        links = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text)
        local = [link for link in links if not link.startswith("http")]
        assert local and [link for link in local if not (ROOT / folder / link).exists()] == []
