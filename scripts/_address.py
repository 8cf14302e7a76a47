"""The repository's own address: scripts/address asks for it once and writes it where it belongs.

`pyproject.toml` holds it. Everything else reads it by `address()`, or is written from it: the first
cell of each notebook (scripts/_build/opened_alone.py), the badges of README, CITATION.cff.
Readable by Python 3.6: it answers --help and --show before any set-up.
"""

import argparse
import os
import re
import subprocess
import sys

ABOUT = """\
Say once what the address of this repository is.

Nobody can know the address of a repository before it is published. Until then each notebook that
is opened alone says so, README has no badges that open it elsewhere, and CITATION.cff names none.

  scripts/address https://github.com/OWNER/REPOSITORY

writes the address into pyproject.toml, which holds it, into CITATION.cff and README.md, and into
the first cell of every notebook; nothing is executed. Commit what has changed.
"""
MISSING = "This copy does not know its own address yet: ./scripts/address https://\u2026 tells it."
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BRANCH = "main"  # the one that links to single notebooks name
FIRST = "notebooks/00_start_here.ipynb"

TABLE = re.compile(r'^\[project\.urls\]\nRepository = "([^"\n]*)"\n\n', re.MULTILINE)
OPTIONAL = re.compile(r"^\[project\.optional-dependencies\]\n", re.MULTILINE)
CITED = re.compile(r'^repository-code: ".*"\n', re.MULTILINE)
BADGE = re.compile(r"^\[!\[Open in \w+\]\([^)]*\)\]\([^)]*\)\n", re.MULTILINE)
SHIELDS = re.compile(r"^!\[[^\]]*\]\(https://img\.shields\.io/[^)]*\)\n", re.MULTILINE)
GITHUB = re.compile(r"https://github\.com/([\w.-]+/[\w.-]+)$")


def address(root=ROOT):
    """Return the address of the repository that `root` is a copy of, None while nobody said it."""
    found = TABLE.search(read(root, "pyproject.toml"))
    return found.group(1) if found else None


def open_links(known, path=FIRST):
    """Return {"Colab": link, "Kaggle": link, "Codespaces": link} that open a notebook of the
    repository `known` there; {} without an address, and for one that is not on GitHub: they open
    no other.
    """
    found = GITHUB.match(known or "")
    if not found:
        return {}
    repository = found.group(1)
    place = f"{repository}/blob/{BRANCH}/{path}"
    return {
        "Colab": f"https://colab.research.google.com/github/{place}",
        "Kaggle": f"https://kaggle.com/kernels/welcome?src=https://github.com/{place}",
        "Codespaces": f"https://codespaces.new/{repository}",
    }


def cleaned(text):
    """Return an address without a final slash or .git; exit with a sentence if it is none."""
    if re.match(r"\w+://[^/]*@", text):
        sys.exit("The address has a name or a password before @, and everybody would read it: "
                 "give it without.")
    if not re.match(r"(https://[\w-]+(\.[\w-]+)+(:\d+)?/|file:///)[\w./~+-]*\w/?$", text):
        sys.exit(f"{text!r} is no address of a repository: give one as "
                 "https://github.com/OWNER/REPOSITORY.")
    text = text.rstrip("/")
    # git clones from either; the shorter one opens in a browser, too
    return text[:-len(".git")] if text.startswith("https") and text.endswith(".git") else text


def parse(arguments):
    """Return the parsed command line; its address is cleaned."""
    parser = argparse.ArgumentParser(
        prog="scripts/address", description=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address", nargs="?", help="https://..., as git clones it")
    parser.add_argument("--show", action="store_true", help="print the address that is known")
    parser.add_argument("--remove", action="store_true", help="take it out everywhere")
    parser.add_argument("--root", default=ROOT, help="the tree to write into (default: this one)")
    options = parser.parse_args(arguments)
    if bool(options.address) + options.show + options.remove != 1:
        parser.error("give one of: an address, --show, --remove")
    if options.address:
        options.address = cleaned(options.address)
    return options


def check(arguments):
    """Answer --show, and exit with a sentence if the arguments are wrong, before any set-up."""
    options = parse(arguments)
    if options.show:
        known = address(options.root)
        print(known or MISSING, file=sys.stdout if known else sys.stderr)
        sys.exit(0 if known else 1)


def project(text, known):
    """Return pyproject.toml with this address, or with None without one."""
    text = TABLE.sub("", text)
    if not known:
        return text
    table = f'[project.urls]\nRepository = "{known}"\n\n'
    place = OPTIONAL.search(text)
    return text[:place.start()] + table + text[place.start():]


def citation(text, known):
    """Return CITATION.cff with this address; its format knows none of a folder (file://)."""
    text = CITED.sub("", text)
    return text + (f'repository-code: "{known}"\n' if (known or "").startswith("https") else "")


def readme(text, links):
    """Return README.md with a badge for each of the links below its other badges."""
    text = BADGE.sub("", text)
    others = list(SHIELDS.finditer(text))
    place = others[-1].end() if others else text.find("\n") + 1
    badges = "".join(
        f"[![Open in {name}](https://img.shields.io/badge/Open_in-{name}-3b6fb6)]({link})\n"
        for name, link in sorted(links.items()))
    return text[:place] + badges + text[place:]


def write(root, known):
    """Write the address, or with None none, into the three files; return the names of those that
    changed."""
    changed = []
    for name, change in (("pyproject.toml", lambda text: project(text, known)),
                         ("CITATION.cff", lambda text: citation(text, known)),
                         # after pyproject.toml, which the links are read from
                         ("README.md", lambda text: readme(text, open_links(known)))):
        before = read(root, name)
        after = change(before)
        if after != before:
            path = os.path.join(root, name)
            with open(path + ".new", "w", encoding="utf-8") as file:
                file.write(after)
            os.replace(path + ".new", path)
            changed.append(name)
    return changed


def read(root, name):
    """Return the text of a file of the tree, '' if there is none."""
    path = os.path.join(str(root), name)
    if not os.path.exists(path):
        return ""
    with open(path, encoding="utf-8") as file:
        return file.read()


def main(arguments):
    """Write the address, and build the notebooks again; return the exit code."""
    options = parse(arguments)
    changed = write(options.root, options.address)
    build = [sys.executable, os.path.join(ROOT, "scripts", "_build"), "--no-execute", "--root",
             options.root]
    code = subprocess.call(build)
    print(f"\nThe address is {options.address}." if options.address else f"\n{MISSING}")
    print(f"Changed: {', '.join(changed)}, and the first cell of each notebook: commit them."
          if changed else "That is how it was before.")
    return code


if __name__ == "__main__":
    check(sys.argv[1:])
    sys.exit(main(sys.argv[1:]))
