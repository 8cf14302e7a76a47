"""The table and the pages that a run leaves."""


from _grade import feedback, table
from _grade.sandbox import PASSED, WAITING, WRONG


def record(student="ada", **changes):
    one = {"number": "2.1", "outcome": WRONG, "points": 0.0, "of": 1.0, "sentence": "it is 3 times",
           "hint": "Divide.", "seconds": 1.0} | changes
    return {"student": student, "lesson": "02_manual_ddp", "flagged": [], "exercises": [one]}


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
    assert feedback.wrong_answers(done, "2.1") == [(2, "it is 3 times"), (1, "it raises")]


def test_what_a_page_says_is_no_markup():
    page = feedback.page_of("<script>", [record(sentence="<img src=x>")])
    assert "<script>" not in page and "<img" not in page
