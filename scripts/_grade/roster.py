"""The roster: who is in the class, and whose a submission is.

A CSV file with a header. The columns stand in any order, and their names may be spelt with
capitals, spaces, hyphens or underscores:

| Column | Also called |
|---|---|
| name | student, student name, full name; or first name and last name (surname) |
| id | student id, id number, SIS user ID |
| email | e-mail, email address, mail |
| username | login, login ID, SIS login ID; it is the id where no column is |
| section | |

Other columns are passed over, so the file may be what Canvas (the gradebook) or Moodle
(participants) exports. Separators are commas, semicolons or tabs; the text is UTF-8.
"""

import csv
import io
import re
import unicodedata
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

COLUMNS = {"name": "name", "student": "name", "studentname": "name", "fullname": "name",
           "firstname": "first", "givenname": "first", "lastname": "last", "surname": "last",
           "familyname": "last", "id": "id", "studentid": "id", "idnumber": "id",
           "sisuserid": "sis", "email": "email", "emailaddress": "email", "mail": "email",
           "username": "login", "login": "login", "loginid": "login", "sisloginid": "login",
           "section": "section"}
# Letters that Unicode does not take apart into a letter and an accent.
_PLAIN = str.maketrans({"ø": "o", "ł": "l", "đ": "d", "æ": "ae", "œ": "oe", "þ": "th", "ı": "i"})
# How Canvas and Moodle name the files of a class that an instructor downloads:
# lovelaceada_LATE_17_4711_02.ipynb, and Ada Lovelace_17_assignsubmission_file.
_DOWNLOADED = re.compile(r"(.+?)_(?:LATE_)?\d+_")


class RosterError(Exception):
    """A roster that cannot be used; the sentence says why."""


@dataclass(frozen=True)
class Student:
    """A row of the roster. canvas: the number that Canvas gives a student, if it is known."""

    name: str
    id: str = ""
    email: str = ""
    login: str = ""
    section: str = ""
    canvas: str = ""

    @property
    def label(self) -> str:
        """How the table calls them."""
        return self.name or self.id or self.email


@dataclass
class Roster:
    """students: in the order of the file. header: its first row, for the assignments in it."""

    students: list[Student]
    header: list[str] = field(default_factory=list)

    def __post_init__(self):
        # Three levels, and the first that names somebody decides: an id is surer than a name.
        self._levels: list[dict[str, set[int]]] = [{}, {}, {}]
        for number, one in enumerate(self.students):
            last_first = " ".join([*one.name.split()[-1:], *one.name.split()[:-1]])
            for level, keys in enumerate([(one.id, one.email, one.login),
                                          (one.email.partition("@")[0],),
                                          (normal(one.name), normal(last_first))]):
                for key in keys:
                    if key:
                        self._levels[level].setdefault(key.casefold(), set()).add(number)

    def owner(self, names: list[str]) -> tuple[Student | None, str]:
        """(the student that a submission with these names of files and folders belongs to, ""), or
        (None, why it is nobody's)."""
        whole = [*names, *(found[1] for name in names if (found := _DOWNLOADED.match(name)))]
        asked = [{name.casefold() for name in whole}] * 2 + [{normal(name) for name in whole}]
        for keys, wanted in zip(self._levels, asked, strict=True):
            numbers = sorted(set().union(*(keys.get(key, ()) for key in wanted)))
            if len(numbers) == 1:
                return self.students[numbers[0]], ""
            if numbers:
                both = " or ".join(_shown(self.students[number]) for number in numbers)
                return None, f"may belong to {both}: name the file by the id"
        return None, "belongs to nobody on the roster"


def _shown(one) -> str:
    return f"{one.label} ({one.id})" if one.id and one.name else one.label


def normal(name: str) -> str:
    """A name without capitals, accents, spaces and signs: "Zoë van Dijk" is zoevandijk."""
    plain = unicodedata.normalize("NFKD", name).casefold().translate(_PLAIN)
    return "".join(each for each in plain if each.isalnum())


def read(path: Path) -> Roster:
    """The roster in a file. Raises RosterError."""
    rows = _rows(path)
    header = [text.strip() for text in rows[0][1]] if rows else []
    columns: dict[str, int] = {}
    for number, text in enumerate(header):
        kind = COLUMNS.get(re.sub(r"[\W_]+", "", text.casefold()))
        if kind and columns.setdefault(kind, number) != number:
            raise RosterError(f"{path} has two columns for the {kind}: {header[columns[kind]]!r} "
                              f"and {text!r}.")
    if not columns.keys() & {"name", "last", "id", "sis", "email", "login"}:
        raise RosterError(f"{path} has no header: its first row must name the columns, as in "
                          "name,id,email.")
    found = []
    for line, row in rows[1:]:
        cells = {kind: row[number].strip() if number < len(row) else ""
                 for kind, number in columns.items()}
        if one := _student(cells):
            found.append((line, one))
    for kind in ("id", "email", "login"):
        _reject_equal(path, kind, [(line, getattr(one, kind)) for line, one in found])
    if "id" not in columns and "sis" not in columns and not columns.keys() & {"email", "login"}:
        _reject_equal(path, "name", [(line, one.name) for line, one in found])
    if not found:
        raise RosterError(f"{path} has a header, and no students below it.")
    return Roster([one for _, one in found], header)


def _rows(path) -> list[tuple[int, list[str]]]:
    """(line, cells) of the rows that are not empty."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RosterError(f"{path} cannot be read ({error.strerror}).") from None
    wide = data[:2] in (b"\xff\xfe", b"\xfe\xff")
    try:
        text = data.decode("utf-16" if wide else "utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[:error.start].count(b"\n") + 1
        raise RosterError(f"{path} is not UTF-8 (line {line}): save it as \"CSV UTF-8\".") from None
    first = text.split("\n")[0]
    separator = max(",;\t", key=first.count)
    try:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
        return [(reader.line_num, row) for row in reader if any(cell.strip() for cell in row)]
    except csv.Error as error:
        raise RosterError(f"{path} is no CSV file ({error}).") from None


def _student(cells) -> Student | None:
    name = cells.get("name") or f"{cells.get('first', '')} {cells.get('last', '')}".strip()
    # Rows of Canvas's own: the maximum of each assignment, and the test student.
    if name.strip().startswith("Points Possible") or name in ("Student, Test", "Test Student"):
        return None
    last, comma, first = name.partition(", ")
    sis, id_, login = (cells.get(kind, "") for kind in ("sis", "id", "login"))
    one = Student(f"{first} {last}" if comma else name, sis if "sis" in cells else id_ or login,
                  cells.get("email", ""), login, cells.get("section", ""),
                  id_ if "sis" in cells else "")
    return one if one.name or one.id or one.email else None


def _reject_equal(path, kind, found):
    for value, often in Counter(value.casefold() for _, value in found).items():
        if value and often > 1:
            lines = [line for line, each in found if each.casefold() == value]
            raise RosterError(f"{path} has the {kind} {value} twice: in lines {lines[0]} and "
                              f"{lines[1]}.")
