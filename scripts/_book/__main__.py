"""Builds the book, and shows it or checks its links if asked to."""

import sys
import time

import _address

from _book import command, links, serve, site
from _book.notebook_pages import Unexecuted
from _book.repository_links import DeadLink


def main() -> int:
    """Returns the exit code: 1 if the book could not be built or has a dead link."""
    options = command.check(sys.argv[1:])
    start, repository = time.monotonic(), _address.address()
    try:
        site.build(options.out.resolve(), repository, lambda step: print(f"  {step}", flush=True))
    except (site.BookError, DeadLink, Unexecuted) as error:
        print(error, file=sys.stderr)
        return 1
    dead = links.dead(options.out)
    print(*dead, sep="\n", file=sys.stderr) if dead else None
    pages, size = links.size(options.out)
    print(f"{options.out}: {pages} pages, {size / 1e6:.1f} MB, in {time.monotonic() - start:.0f} s")
    if not repository:
        print(_address.MISSING)
    if options.links:
        dead += links.unreachable(options.out)
    if options.serve:
        serve.serve(options.out, options.serve)
    return 1 if dead else 0


if __name__ == "__main__":
    sys.exit(main())
