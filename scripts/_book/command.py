"""Command line of scripts/book."""

import argparse
from pathlib import Path

from _book.pages import ROOT

EPILOG = """\
The pages show what the executed solutions printed and drew: nothing is executed here. The site
needs no server: open OUT/index.html.

examples:
  scripts/book                   builds it, in about a minute
  scripts/book --serve           builds it, and shows it at http://127.0.0.1:8000
  scripts/book --links           asks each address of another site whether it is still there
"""


def check(arguments: list) -> argparse.Namespace:
    """The parsed command line; exits with a sentence if it is wrong."""
    parser = argparse.ArgumentParser(
        prog="scripts/book", formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Build the workbook's web book, a static site.", epilog=EPILOG)
    parser.add_argument("--out", metavar="OUT", type=Path, default=ROOT / "site",
                        help="the folder of the site (site)")
    parser.add_argument("--serve", nargs="?", type=int, const=8000, metavar="PORT",
                        help="then show it on this machine alone, until Ctrl-C (port 8000)")
    parser.add_argument("--links", action="store_true",
                        help="then ask each address of another site whether it is still there")
    options = parser.parse_args(arguments)
    held = list(options.out.iterdir()) if options.out.exists() else []
    if held and not (options.out / "index.html").exists():
        parser.error(f"{options.out} holds something else than a book: name another folder")
    return options
