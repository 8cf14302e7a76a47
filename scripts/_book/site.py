"""Runs Sphinx on the staged sources, and puts the site together."""

import contextlib
import io
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from _book import staging

THEME = Path(__file__).parent / "theme"
# What Sphinx and its theme leave in the site that no page uses: their own templates and maps.
NOT_SHOWN = (".buildinfo", "objects.inv", "_static/**/*.map", "_static/*-macros.html",
             "_static/**/*.LICENSE.txt.gz")


class BookError(Exception):
    """The book could not be built; the sentence says why."""


def build(out: Path, repository: str | None, progress: Callable[[str], None]) -> None:
    """Builds the book into the folder `out`; an older book there is replaced when the new one is
    complete. repository: its address, for links to files that are no pages. Raises BookError."""
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".book-") as folder:
        staged, site = Path(folder, "pages"), Path(folder, "site")
        staged.mkdir(), site.mkdir()
        staging.write_sources(staged, site, repository, progress)
        shutil.copytree(THEME, staged / "_theme")
        shutil.move(staged / "_theme" / "conf.py", staged / "conf.py")
        progress("pages")
        _run_sphinx(staged, site, Path(folder, "doctrees"), repository)
        if out.exists():
            shutil.rmtree(out)
        site.rename(out)


def _run_sphinx(staged, site, doctrees, repository):
    from sphinx.application import Sphinx
    from sphinx.util.console import nocolor

    nocolor()
    warnings = io.StringIO()
    with contextlib.redirect_stderr(io.StringIO()):
        app = Sphinx(staged, staged, site, doctrees, "html", status=None, warning=warnings,
                     confoverrides={"html_context.repository": repository or ""}, parallel=2)
        app.build()
    for pattern in NOT_SHOWN:
        for left in site.glob(pattern):
            left.unlink()
    said = warnings.getvalue().strip().replace(f"{staged}/", "")
    if said or app.statuscode:
        raise BookError(f"Sphinx objects:\n{said}")
