"""The table and the pages that a run leaves."""

import re

import pytest
from _grade import class_page, feedback, handed_in, lessons, table
from _grade.sandbox import PASSED, ROOT, WAITING, WRONG


def record(student="ada", **changes):
    one = {"number": "2.1", "outcome": WRONG, "points": 0.0, "of": 1.0, "sentence": "it is 3 times",
           "hint": "Divide.", "seconds": 1.0} | changes
    return {"student": student, "lesson": "02_manual_ddp", "forged": [], "remarks": [],
            "exercises": [one]}


def test_a_spreadsheet_runs_nothing(tmp_path):
    table.write(tmp_path / "g.csv", [record("=1+1", sentence="@SUM(1)", outcome=PASSED),
                                     record("\r=1")], [("=2+2", "-1")])
    text = (tmp_path / "g.csv").read_bytes()
    assert b"\n'=2+2,0,,,,,'-1," in text and b"'\r=1" in text
    assert "\n'=1+1," in (tmp_path / "g.csv").read_text()
    assert "'@SUM(1)" in (tmp_path / "g.csv").read_text()


def test_a_line_names_the_notebook_by_its_number():
    assert "ada  02  1.0 s" in table.in_words(record())
    assert "ada  07a  1.0 s" in table.in_words(record() | {"lesson": "07a_tensor_parallel"})


def test_a_name_leads_nowhere_else(tmp_path):
    folder = tmp_path / "pages"
    folder.mkdir()
    feedback.write(folder, [record("../../etc"), record("class"), record("a<b>"), record("A-b"),
                            record("\u597d" * 300), record("\u597d" * 301)])
    assert {path.name for path in tmp_path.iterdir()} == {"pages"}
    assert len(list(folder.iterdir())) == 8


def test_wrong_answers_that_differ_in_numbers_are_one_kind():
    done = [record(sentence="it is 3 times"), record(sentence="it is 4 times"),
            record(sentence="it raises"), record(outcome=WAITING)]
    assert class_page.wrong_answers(done, "2.1") == [(2, "it is 3 times"), (1, "it raises")]


def test_what_a_page_says_is_no_markup():
    page = feedback.page_of("<script>", [record(sentence="<img src=x>")])
    assert "<script>" not in page and "<img" not in page


def test_feedback_names_exercises_and_links_to_their_sections():
    page = feedback.page_of("ada", [record(), record(number="2.10")], "https://x.edu/book/")
    assert "<h2>02 Manual DDP</h2>" in page and "Your sentences: to read" in page
    anchor = "exercise-2-10-compare-with-distributeddataparallel"
    assert f"https://x.edu/book/notebooks/02_manual_ddp.html#{anchor}" in page
    assert "2.1 Combine the shards&#x27; gradients" in page
    assert "href" not in feedback.page_of("ada", [record()])


def test_the_class_page_says_each_outcome_with_a_sign_and_in_words():
    rows = [handed_in.Row("ada", records=[record(outcome=PASSED, points=1.0)]),
            handed_in.Row("<bob>", records=[record(sentence="'it' is <3")]),
            handed_in.Row("eve", records=[record(outcome=WAITING), record(number="2.10")],
                          late=[("02_manual_ddp", "3 h")]), handed_in.Row("zoe")]
    page = class_page.page(rows, "", {id(rows[0]): "ada.html"}, "written.html")
    signs = re.findall(r"<span class='(\w+)' role='img' aria-label='2\.1 Combine the shards&#x27; "
                       r"gradients: ([^']*)'.*?>(.)<", page)
    assert signs == [("good", "passed", "✓"), ("bad", "wrong: &#x27;it&#x27; is &lt;3", "✗"),
                     ("plain", "waiting", "–"), ("plain", "not handed in", "–")]
    assert "<a href='ada.html'><span" in page and "02 by 3 h" in page and "<bob>" not in page
    assert page.count("<a href='written.html'>to&nbsp;read</a>") == 1 and "tabindex='0'" in page
    assert "3 of 4 students handed in · mean 0.2 of 2 points" in page
    for number in ("2.1", "2.10"):
        assert f"href='#e{number}'" in page and f"id='e{number}'" in page


@pytest.mark.parametrize(("points", "words"), [([0, 1, 2, 2], "90 to 100 %: 2"),
                                               ([], "0 to 10 %: 0")])
def test_the_distribution_of_points(points, words):
    assert words in class_page.distribution(points, 2)


def test_anchors_are_those_of_sphinx():
    nodes = pytest.importorskip("docutils.nodes")
    for number, found in lessons.headings(ROOT).items():
        assert found.anchor == nodes.make_id(f"Exercise {number} · {found.title}")
