"""The moving pictures on the book's first page (scripts/animate makes them)."""

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
    """The HTML of all animations, and their stills for readers who prefer no motion."""
    return "\n".join(f'<p class="moving">{catalogue.picture_html(name, IN_SITE)}</p>\n'
                     for name in catalogue.read())
