"""Writes the sources of all pages into a folder, for Sphinx."""

from collections.abc import Callable
from pathlib import Path

from _book import (
    animations,
    glossary,
    gpu_runs,
    mathml,
    notebook_pages,
    repository_links,
    results,
)
from _book.pages import INDEX, NOTEBOOKS, PAGES, ROOT, Page, contents, page_of

GENERATED = {"{results}": results.tables, "{animations}": animations.on_page,
             "{gpu_runs}": gpu_runs.on_page}


def write_sources(staged: Path, site: Path, repository: str | None,
                  progress: Callable[[str], None]) -> None:
    """Writes a source for each page of the book below `staged`; pictures, animations and notebooks
    to be taken along go straight below `site`. repository: the address of the repository, if known.
    progress is called with the name of each notebook."""
    for name in NOTEBOOKS:
        progress(name)
        page, answers = (page_of(f"{folder}/{name}.ipynb") for folder in ("notebooks", "solutions"))
        notebook_pages.write_pages(page, answers, staged, site, repository)
    for page in PAGES:
        if page.source.endswith(".md"):
            target = staged / f"{page.address}.md"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(_markdown(page, site, repository), encoding="utf-8")
    animations.copy(site)


def _markdown(page: Page, site: Path, repository: str | None) -> str:
    text = (ROOT / page.source).read_text(encoding="utf-8")
    if page.address == "glossary":
        text = glossary.with_anchors(text)
    text = repository_links.rewrite(text, page, repository)
    text = repository_links.outside_code(text, mathml.render)
    for mark, generate in GENERATED.items():
        if mark in text:
            text = text.replace(mark, generate(site))
    return text + (_contents() if page is INDEX else "")


def _contents() -> str:
    """The book's contents, which stand beside each page and not on the first one itself."""
    options = ["```{toctree}", ":hidden:"]
    chapters = ["\n".join([*options, f":caption: {chapter}", "", *addresses, "```"])
                for chapter, addresses in contents().items()]
    return "\n\n" + "\n\n".join(chapters) + "\n"
