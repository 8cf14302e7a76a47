"""Checks the links of a built site."""

import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

PARTS = {"img": "src", "source": "srcset", "link": "href", "script": "src"}
# A <link> that only says where other pages are.
NO_PARTS = ("index", "search", "next", "prev", "canonical")
PATIENCE = 20  # seconds for another site to answer


class _Page(HTMLParser):
    """The links and anchors of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.links: list[str] = []  # what a reader may follow
        self.parts: list[str] = []  # what a browser fetches to show the page
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        elif given.get(PARTS.get(tag, "")) and given.get("rel") not in NO_PARTS:
            self.parts.append(given[PARTS[tag]])


def dead(site: Path) -> list[str]:
    """A sentence for each link within the site whose file or anchor is not there, and for each
    thing that a page would fetch from another host to show itself."""
    pages = {path.resolve(): _Page(path.read_text(encoding="utf-8"))
             for path in sorted(site.rglob("*.html"))}
    return [f"{path.relative_to(site.resolve())}: {wrong}" for path, page in pages.items()
            for wrong in [*(wrong for link in page.links + page.parts
                            for wrong in _wrong(link, path, pages)),
                          *(f"fetches {part} from another host." for part in page.parts
                            if urlsplit(part).netloc)]]


def _wrong(link, path, pages) -> Iterator[str]:
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if not target.is_file():
        yield f"links to {link}, which is not there."
    elif parts.fragment and target in pages and (
            unquote(parts.fragment) not in pages[target].anchors):
        yield f"links to {link}, and {target.name} has no such place."


def external(site: Path) -> dict[str, str]:
    """Each address of another site that a page links to → one page that does."""
    return {link.split("#")[0]: path.relative_to(site).as_posix()
            for path in sorted(site.rglob("*.html"), reverse=True)
            for link in _Page(path.read_text(encoding="utf-8")).links
            if urlsplit(link).scheme in ("http", "https")}


def unreachable(site: Path) -> list[str]:
    """A sentence for each address of another site that does not answer; prints what it asks."""
    found = sorted(external(site).items())
    print(f"asking {len(found)} addresses of other sites ...", flush=True)
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(_answer, [address for address, _ in found])
        wrong = [f"{page}: {address}: {answer}" for (address, page), answer
                 in zip(found, answers, strict=True) if answer]
    print(*wrong, f"{len(found) - len(wrong)} of {len(found)} answered", sep="\n")
    return wrong


def _answer(address) -> str:
    """Why an address cannot be had, "" if it can."""
    request = urllib.request.Request(address, headers={"User-Agent": "Mozilla/5.0"})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE):
            return ""
    except OSError as error:  # HTTPError and URLError are
        return str(error)


def size(site: Path) -> tuple[int, int]:
    """(number of pages, bytes of all files)."""
    files = [path for path in site.rglob("*") if path.is_file()]
    return (sum(path.suffix == ".html" for path in files),
            sum(path.stat().st_size for path in files))
