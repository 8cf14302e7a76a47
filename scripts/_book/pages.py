"""Which pages the book has, from which files, and in which order they stand in its contents."""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = tuple(sorted(path.stem for path in (ROOT / "notebooks").glob("[0-9]*.ipynb")))
NOTES = tuple(sorted(path.stem for path in (ROOT / "solutions" / "notes").glob("*.md")))


@dataclass(frozen=True)
class Page:
    """A page of the book: the file of the repository that it shows, its address in the site without
    .html, and the chapter under which the contents list it. No chapter: it is reached by links."""

    source: str
    address: str
    chapter: str | None


START, LABS, BESIDE = "Start", "Notebooks", "Beside the notebooks"
COURSE, MORE = "For instructors", "For contributors"
INDEX = Page("book/index.md", "index", None)
PAGES = (
    INDEX,
    Page("book/setup.md", "setup", START),
    Page("book/machines.md", "machines", START),
    Page("SYLLABUS.md", "syllabus", START),
    *(Page(f"notebooks/{name}.ipynb", f"notebooks/{name}", LABS) for name in NOTEBOOKS),
    *(Page(f"solutions/{name}.ipynb", f"answers/{name}", None) for name in NOTEBOOKS),
    Page("solutions/reading.md", "answers/reading", None),
    *(Page(f"solutions/notes/{name}.md", f"answers/notes/{name.replace('README', 'index')}", None)
      for name in NOTES),
    Page("solutions/written.md", "answers/written", None),
    Page("GLOSSARY.md", "glossary", BESIDE),
    Page("book/results.md", "results", BESIDE),
    Page("experiments/reference/h200/README.md", "results_h200", BESIDE),
    Page("book/instructors.md", "instructors", COURSE),
    Page("book/node.md", "node", COURSE),
    Page("scripts/cloud/README.md", "cloud", COURSE),
    Page("scripts/cluster/README.md", "cluster", COURSE),
    Page("CONTRIBUTING.md", "contributing", MORE),
    Page("tests/pretend/README.md", "pretend_gpus", MORE),
)


def page_of(source: str) -> Page | None:
    """The page that shows this file of the repository, None if there is none."""
    return next((page for page in PAGES if page.source == source), None)


def contents() -> dict[str, list[str]]:
    """Chapter → the addresses of its pages, both in the order of the book."""
    found: dict[str, list[str]] = {}
    for page in PAGES:
        if page.chapter:
            found.setdefault(page.chapter, []).append(page.address)
    return found
