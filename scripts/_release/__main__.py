"""Command line of scripts/release."""

import argparse
import re
import sys
from pathlib import Path

EPILOG = """\
what it writes, from the last commit:
  OUT/workbook-TAG[-VARIANT].tar.gz and .zip: notebooks, labs and what starts them; no solutions/,
  no tests/, no outputs of solutions, no grader; CHANGELOG.md says what is new
and it tags the commit TAG, unless the tag is there already, or --no-tag.

--variant NAME gives each class other numbers, so that another class's do not fit: training data,
and so losses; the letters of notebook 05's slow runs; the figure of exercise 6.3; the random cases
of a grader's checks. The same NAME gives the same numbers. To grade that class, write NAME into
labs/workers/variant.txt of the checkout that grades.

exit code: 0; 1 if git cannot make it; 2 if an argument is wrong.

examples:
  scripts/release v1.0
  scripts/release v1.0 --variant spring-2027 --out dist
"""


def check(arguments: list) -> argparse.Namespace:
    """The parsed command line; exits with a sentence if it is wrong."""
    parser = argparse.ArgumentParser(
        prog="scripts/release", formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Make an archive of the workbook for students, without answers.",
        epilog=EPILOG)
    parser.add_argument("tag", metavar="TAG", help="the release's name, as in v1.0")
    parser.add_argument("--variant", metavar="NAME", default="",
                        help="a class, as in spring-2027: it gets numbers of its own")
    parser.add_argument("--out", metavar="OUT", default="dist",
                        help="the folder to write to (dist)")
    parser.add_argument("--no-tag", action="store_true", help="do not tag the commit")
    options = parser.parse_args(arguments)
    for name in filter(None, (options.tag, options.variant)):
        if not re.match(r"[A-Za-z0-9][\w.-]*$", name) or ".." in name:
            parser.error(f"{name!r} is no name: letters, digits, dots and hyphens")
    return options


def main() -> int:
    options = check(sys.argv[1:])
    from _release import archive

    root = Path(__file__).resolve().parents[2]
    try:
        for path in archive.write(root, options.tag, options.variant, Path(options.out)):
            print(path)
        if not options.no_tag and archive.add_tag(root, options.tag):
            print(f"tagged {options.tag}: git push origin {options.tag}")
    except archive.ReleaseError as error:
        print(f"scripts/release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
