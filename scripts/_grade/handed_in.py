"""What each student has handed in: the rows of the table and of the pages."""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from _grade import files
from _grade.roster import Roster, Student

# nbgrader writes it beside a submission: 2026-12-01 22:10:15.123456 UTC, by its standard setting.
TIMESTAMP = "timestamp.txt"
_UTC = re.compile(r"\s*(?:UTC|GMT|Z)$")


@dataclass
class Row:
    """student: None of a submission that is nobody's on the roster, and where there is no roster.
    records: the submissions that count. unreadable: (file, why). late: (notebook or file, "3 h").
    remark: what an instructor should look at."""

    label: str
    student: Student | None = None
    records: list[dict] = field(default_factory=list)
    unreadable: list[tuple[str, str]] = field(default_factory=list)
    late: list[tuple[str, str]] = field(default_factory=list)
    remark: list[str] = field(default_factory=list)


def by_name(done: list[dict], unreadable: list[tuple[str, str]]) -> list[Row]:
    """Without a roster: one row for each name of a file or folder, unreadable files at the end."""
    rows: dict[str, Row] = {}
    for one in done:
        rows.setdefault(one["student"], Row(one["student"])).records.append(one)
    rows = {label: rows[label] for label in sorted(rows)}
    return [*rows.values(), *(Row(label, unreadable=[(label, why)]) for label, why in unreadable)]


def by_roster(roster: Roster, done: list[dict], unreadable: list[tuple[str, str]],
              paths: dict[str, Path], given: Iterable[Path]) -> list[Row]:
    """A row for each student of the roster, in its order, also for who handed in nothing; behind
    them those submissions that are nobody's, each with the reason. Of two files of one notebook the
    newer counts. paths: a submission's name -> its file."""
    rows = {one: Row(one.label, one) for one in roster.students}
    nobodys = []
    for label, record, why in [*((one["student"], one, "") for one in done),
                               *((label, None, why) for label, why in unreadable)]:
        path = paths.get(_key(label, record))
        owner, reason = roster.owner(_names(label, path, given))
        row = rows[owner] if owner else Row(label, remark=[reason])
        if not owner:
            nobodys.append(row)
        if record is None:
            row.unreadable.append((label, why))
        else:
            row.records.append(record)
    for row in rows.values():
        _keep_newest(row, paths)
    return [*rows.values(), *nobodys]


def _names(label, path, given) -> list[str]:
    """The names that may say whose a submission is: of the file, and of the folders below those
    that were given."""
    found = label.split("/")
    if path is not None:
        for folder in map(os.path.abspath, given):
            below = os.path.relpath(path, folder)
            if not below.startswith(".."):
                found += [Path(below).stem, *Path(below).parts[:-1]]
                if Path(folder).is_dir():
                    found.append(Path(folder).name)
    return list(dict.fromkeys(found))


def _key(label, record) -> str:
    return record["file"] if record else label


def _keep_newest(row, paths):
    newest = {}
    for record in row.records:
        path = paths.get(record["file"])
        when = submitted(path) if path else datetime.min.replace(tzinfo=UTC)
        before = newest.get(record["lesson"])
        if before is None or when > before[0]:
            newest[record["lesson"]] = when, record
    counted = [record for _, record in newest.values()]
    for record in row.records:
        if record not in counted:
            row.remark.append(f"{Path(record['file']).name} is not counted: "
                              f"{Path(newest[record['lesson']][1]['file']).name} is newer")
    row.records = counted


def paths_of(given: list[Path], done: list[dict]) -> dict[str, Path]:
    """A file as a record has it -> its path; of a file that has no record, its name."""
    recorded, found = {one["file"] for one in done}, {}
    for name, path in files.files_of(given):
        file = files.shown(str(path))
        found[file if file in recorded else name] = path
    return found


def add_late(rows: list[Row], paths: dict[str, Path], due: datetime) -> None:
    """Marks what was handed in after `due`; no points are taken."""
    for row in rows:
        for name, key in [*((one["lesson"], one["file"]) for one in row.records),
                          *((file, file) for file, _ in row.unreadable)]:
            if (path := paths.get(key)) and (words := late_by(submitted(path), due)):
                row.late.append((name, words))


def submitted(path: Path) -> datetime:
    """When a file was handed in: what nbgrader's timestamp.txt beside it says, else when the file
    was last written. A student could write either, where the folders are their own."""
    try:
        text = files.read(path.parent / TIMESTAMP)[:80].decode().strip()
        return datetime.fromisoformat(_UTC.sub("+00:00", text)).astimezone()
    except (files.Unreadable, ValueError):
        try:
            return datetime.fromtimestamp(path.lstat().st_mtime, UTC)
        except OSError:
            return datetime.min.replace(tzinfo=UTC)


def late_by(when: datetime, due: datetime) -> str:
    """"3 h" where `when` is 3 hours after `due`, else empty. A due time without a zone is the
    machine's."""
    minutes = (when - due.astimezone()).total_seconds() / 60
    if minutes <= 0:
        return ""
    if minutes < 60:
        return f"{max(1, round(minutes))} min"
    return f"{minutes / 60:.0f} h" if minutes < 48 * 60 else f"{minutes / 1440:.0f} days"
