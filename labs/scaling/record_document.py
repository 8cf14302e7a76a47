"""Writes the record: a folder `experiments/DATE-MACHINE` that is there completely or not at all;
and the table of what a written one says."""

import contextlib
import html
import json
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import psutil

from labs.checks.verdicts import COLOURS, SIGNS, Verdict, card, shows
from labs.meters.trace_file import WORKBOOK, experiments_folder
from labs.pictures.tables import Table
from labs.scaling import record_page, record_session
from labs.scaling.record_session import TOPICS, Session
from labs.words import counted, listed
from labs.workers.progress import status

MOST_TRACES = 100e6  # bytes that are copied; those of a node can be larger, and stay where they are
_UNFINISHED = ".unfinished-"


@dataclass(frozen=True)
class Record:
    """What `document` wrote. folder: None where nothing could be written; problem: why. table: what
    is furthest from its prediction. Draws itself, with links."""

    folder: Path | None
    summary: str
    missing: tuple[str, ...] = ()
    problem: str = ""
    table: Table | None = None

    @property
    def readme(self) -> Path | None:
        """The page to begin with."""
        return self.folder and self.folder / "README.md"

    def __repr__(self):
        if self.folder is None:
            return f"{SIGNS[None]} nothing was written: {self.problem}"
        return "\n".join([f"{_from_here(self.readme)}: {self.summary}", *self._not_measured(),
                          *([repr(self.table)] if self.table else [])])

    def _not_measured(self) -> list[str]:
        return [f"not measured in this session: {listed(self.missing)}"] if self.missing else []

    def _repr_html_(self):
        if self.folder is None:
            return card(COLOURS[None], f"{SIGNS[None]} Nothing was written", self.problem)
        links = ", ".join(f"<a style='text-decoration:underline' "
                          f"href='{html.escape(_from_here(path), quote=True)}'>{name}</a>"
                          for name, path in [("README.md", self.readme),
                                             ("papers.md", self.folder / "papers.md"),
                                             ("numbers.json", self.folder / "numbers.json")])
        lines = [f"<b>{html.escape(_from_here(self.folder))}</b>: {links}", self.summary,
                 *self._not_measured()]
        page = "<br>".join(lines)
        return f"{page}<br><br>{self.table._repr_html_()}" if self.table else page


def _from_here(path: Path) -> str:
    """Relative to the working folder, as JupyterLab reads a link in a notebook."""
    return os.path.relpath(path)


def document(into: str | os.PathLike | None = None) -> Record:
    """Writes what this session has shown to a new folder DATE-MACHINE: README.md with tables and
    pictures, papers.md, numbers.json, and copies of the traces. A second record of a day becomes
    DATE-MACHINE-2.

    into: the folder for it; None means `experiments` of the workbook, or, where the notebook lies
    outside of it, beside the notebook.
    """
    base = Path(into).expanduser() if into is not None else experiments_folder()
    session, now = Session.now(), datetime.now()
    try:
        with status("writing the record"), _finished_folder(base) as (folder, keep_as):
            found = record_session.facts(WORKBOOK)
            files = _pictures(session, folder) | _traces(session, folder)
            _write(session, found, now, files, folder)
            written = keep_as(f"{now.date().isoformat()}-{record_session.folder_name(found)}")
    except OSError as error:
        return Record(None, "", problem=(
            f"{base} cannot be written to ({error.strerror or error}). Name a folder that can: "
            "lab.show_record(\"~/record\")"))
    traces = sum(path.startswith("traces/") for path in files.values())
    summary = ", ".join([counted(len(session.rows), "number"), counted(len(files) - traces,
                        "picture"), counted(traces, "trace"),
                        counted(len(session.verdicts), "verdict")])
    return Record(written, summary, tuple(TOPICS[topic].lower() for topic in session.missing))


@contextlib.contextmanager
def _finished_folder(base: Path) -> Iterator[tuple]:
    """(a hidden folder to write into, a function that gives it its name and returns the path).
    Without a name it is removed, and so is what a process that was killed left."""
    base.mkdir(parents=True, exist_ok=True)
    # The folder's name has the process id: what belongs to a living process is being written.
    for left in base.glob(f"{_UNFINISHED}*"):
        if not psutil.pid_exists(int("0" + left.name.removeprefix(_UNFINISHED))):
            shutil.rmtree(left, ignore_errors=True)
    folder = base / f"{_UNFINISHED}{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()

    def keep_as(name: str) -> Path:
        for number in range(1, 1000):
            path = base / (name if number == 1 else f"{name}-{number}")
            # mkdir fails where somebody was quicker; renaming onto an empty folder is atomic
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                try:
                    return folder.rename(path)
                except BaseException:
                    with contextlib.suppress(OSError):
                        path.rmdir()
                    raise
        raise FileExistsError(f"{base} has 999 records of today")

    try:
        yield folder, keep_as
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _pictures(session, folder) -> dict[str, str]:
    """Function -> path of the picture, of those that could be drawn."""
    files = {}
    for number, result in enumerate(session.pictures, 1):
        path = folder / "pictures" / f"{number:02d}_{result.function}.png"
        path.parent.mkdir(exist_ok=True)
        with contextlib.suppress(ValueError, RuntimeError):  # matplotlib's: one picture is missing
            path.write_bytes(result.found.png())
            files[result.function] = f"pictures/{path.name}"
    return files


def _traces(session, folder) -> dict[str, str]:
    """Path of a trace -> path of its copy; together MOST_TRACES bytes at most."""
    files, room = {}, MOST_TRACES
    for path in session.traces:
        room -= path.stat().st_size
        if room < 0:
            break
        copy = folder / "traces" / path.name
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)
        files[str(path)] = f"traces/{path.name}"
    return files


def _write(session, found, now, files, folder) -> None:
    data = {"date": now.isoformat(timespec="seconds"),
            "machine": {"title": record_session.title(found), **found},
            **session.as_data(), "files": [*files.values()]}
    (folder / "numbers.json").write_text(
        json.dumps(_finite(data), indent=1, ensure_ascii=False), encoding="utf-8")
    text = record_page.page(session, found, f"{now:%Y-%m-%d %H:%M}", files)
    (folder / "README.md").write_text(text, encoding="utf-8")
    (folder / "papers.md").write_text(record_page.papers_page(session), encoding="utf-8")


def _finite(data: object) -> object:
    """JSON has no infinities: they become null."""
    if isinstance(data, dict):
        return {str(name): _finite(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


TITLE = "The record"


@shows(TITLE)
def show_record(into: str | os.PathLike | None = None) -> Record | Verdict:
    """Writes the record (`document`), and returns it with a table of how many numbers of each topic
    it has, and which of them is furthest from its prediction."""
    record = document(into)
    if record.folder is None:
        return Verdict(TITLE, None, f"nothing was written: {record.problem}")
    return replace(record, table=_read_back(record))


def _read_back(record: Record) -> Table:
    """From the written file, so that what it says is what was written."""
    data = json.loads((record.folder / "numbers.json").read_text(encoding="utf-8"))
    by_topic = {topic: [one for one in data["numbers"] if one["topic"] == topic]
                for topic in TOPICS}
    rows = [(TOPICS[topic], *_furthest(numbers)) for topic, numbers in by_topic.items()]
    versions = data["machine"]["versions"]
    return Table(f"{data['machine']['title']}, {data['date'].replace('T', ' ')}, torch "
                 f"{versions['torch']}", ("topic", "number furthest from its prediction", "error",
                                          "numbers", "with a prediction"), rows, left=1)


def _furthest(numbers: Sequence[dict]) -> tuple:
    """(which number is furthest from its prediction, by how much, how many numbers there are, how
    many of them were predicted)."""
    errors = {one["name"]: one["value"] / one["predicted"] - 1 for one in numbers
              if one["predicted"] and one["value"] is not None}
    worst = max(errors, key=lambda name: abs(errors[name]), default=None)
    error = "" if worst is None else f"{errors[worst]:+.1%}"
    return worst or "none has a prediction", error, len(numbers), len(errors)
