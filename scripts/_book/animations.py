"""The moving pictures on the book's first page (scripts/animate makes them)."""

import html
import shutil
from pathlib import Path

from _animate import catalogue

IN_SITE = "animations"  # the folder of the site that has a copy


def copy(site: Path) -> None:
    """Copies the animations and their stills into the site."""
    (site / IN_SITE).mkdir()
    for entry in catalogue.read().values():
        for name in (entry["file"], entry["still"]):
            shutil.copy(catalogue.FOLDER / name, site / IN_SITE / name)


def on_page(_site: Path) -> str:
    """The HTML of all animations, each below its lesson; their stills for whoever prefers no
    motion."""
    return "\n".join(
        f'<figure class="moving">{catalogue.picture_html(name, IN_SITE)}'
        f'<figcaption>{html.escape(entry["title"])}</figcaption></figure>\n'
        for name, entry in catalogue.read().items())
