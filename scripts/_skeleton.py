"""What scripts/new-notebook and scripts/new-exercise write: the files of scripts/_skeletons, with
names in place of their {{fields}}."""

import keyword
import re
from pathlib import Path

import _notebooks

ROOT = Path(__file__).resolve().parent.parent
TEMPLATES = ROOT / "scripts" / "_skeletons"
LINE = 100  # characters, of a line of code
LONGEST_TITLE = 60  # characters: it stands in a line of code
TITLE = re.compile(rf"[^\"\\\n{{}}]{{1,{LONGEST_TITLE}}}$")
TITLE_ERROR = (f"a title is one line of at most {LONGEST_TITLE} characters, without quotes, braces "
               "and backslashes")
PYTHON_NAME = re.compile(r"[a-z][a-z0-9_]*$")


def is_python_name(name):
    """Return whether a function and a file may be called so."""
    return bool(PYTHON_NAME.match(name)) and not keyword.iskeyword(name)


def filled(template, **fields):
    """Return the text of a template with these names in place of its {{fields}}."""
    text = (TEMPLATES / f"{template}.txt").read_text(encoding="utf-8")
    for field, value in fields.items():
        text = text.replace("{{" + field + "}}", value)
    return re.sub(r"(?:^ *from labs\..*\n)+", sorted_lines, text, flags=re.MULTILINE)


def sorted_lines(block):
    """Return a block of imports in order: where the package's own belongs depends on its name."""
    return "".join(sorted(block[0].splitlines(keepends=True)))


def facade_line(package, function):
    """Return the line of a package's `__init__` that offers an exercise's check and picture."""
    names = [f"check_{function}", f"show_{function}"]
    line = f"    from labs.{package}.{function} import {', '.join(names)}\n"
    if len(line) <= LINE + 1:
        return line
    return (f"    from labs.{package}.{function} import (\n"
            + "".join(f"        {name},\n" for name in names) + "    )\n")


def in_code(title):
    """Return a title as it stands in a comment of a cell: 'the largest over ranks'."""
    return title[:1].lower() + title[1:]


def exercises(solutions, number):
    """Return {3.10: path of the source} of all exercises of the notebooks with this number."""
    heading = re.compile(rf"^# ### Exercise ({int(number[:2])}\.\d+)", re.MULTILINE)
    return {found: path for path in _notebooks.paths(solutions) if path.stem[:2] == number[:2]
            for found in heading.findall(path.read_text(encoding="utf-8"))}


def write(root, texts):
    """Write {path from the root: text}, and print the paths."""
    for path, text in texts.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
        print(path)
