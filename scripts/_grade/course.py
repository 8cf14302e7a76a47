"""Grades a class, and then writes what a roster, a due time and a gradebook need."""

import json
import sys
from pathlib import Path

import _address

from _grade import exports, feedback, handed_in, lessons, roster, session, similar, table
from _grade.sandbox import ROOT
from labs.workers import cores

# Exit codes of session.run after which the table is there: done, with remarks, interrupted.
_WRITTEN = (0, 1, 130)


def run(options, given: list[Path], out: Path) -> int:
    """Grades what was given; returns the exit code."""
    try:
        students = roster.read(Path(options.roster)) if options.roster else None
    except roster.RosterError as error:
        print(error, file=sys.stderr)
        return 2
    if options.moodle and not exports.moodle_columns(students.students):
        print(f"{options.roster} has no id, email or username of each student, and --moodle needs "
              "one of them.", file=sys.stderr)
        return 2
    made = out.with_suffix("") / table.MADE_FROM
    made.unlink(missing_ok=True)  # of an earlier run: this one may end before it has a table
    code = session.run(options, given, out)
    if code not in _WRITTEN or not made.exists():
        return code
    try:
        write(options, given, out, students, **json.loads(made.read_text("utf-8")))
    except KeyboardInterrupt:
        return 130
    return code


def _write_similar(options, path, rows, paths):
    """Looks through the submissions again, behind the same walls, and writes and prints the list.
    """
    sandbox = session.Sandbox([], not options.unsafe)
    try:
        text = similar.listed(rows, paths, lessons.read_lessons(ROOT), sandbox.look,
                              options.at_once or max(1, cores.available() // 2), options.only)
    finally:
        sandbox.close()
    path.write_text(text, encoding="utf-8")
    print(f"\n{text}{path}")


def _book() -> str:
    """The address of the web book, where .github/workflows/book.yml puts it; empty before
    scripts/address knows the repository's."""
    found = _address.GITHUB.match(_address.address() or "")
    owner, _, name = found[1].partition("/") if found else ("", "", "")
    return f"https://{owner.lower()}.github.io/{name}" if found else ""


def write(options, given: list[Path], out: Path, students: roster.Roster | None, done: list[dict],
          unreadable: list[tuple[str, str]], notes: list[str]) -> None:
    """Writes the table, the pages and the exports. notes: on this machine."""
    paths = handed_in.paths_of(given, done)
    if students:
        rows = handed_in.by_roster(students, done, unreadable, paths, given)
    else:
        rows = handed_in.by_name(done, unreadable)
    if options.due:
        handed_in.add_late(rows, paths, options.due)
    table.write_rows(out, rows, roster=bool(students))
    # The session has named pages by files; where a roster knows better names, those are the pages.
    for name in feedback.names(handed_in.by_name(done, [])).values():
        (out.with_suffix("") / name).unlink(missing_ok=True)
    feedback.write_rows(out.with_suffix(""), rows, options.book or _book(), notes)
    for row in rows:
        if row.remark:
            print(f"{row.label}: {'; '.join(row.remark)}", file=sys.stderr)
    if options.similar:
        _write_similar(options, out.with_suffix("") / "similar.txt", rows, paths)
    if options.canvas:
        exports.canvas(Path(options.canvas), rows, students)
    if options.moodle:
        exports.moodle(Path(options.moodle), rows)
