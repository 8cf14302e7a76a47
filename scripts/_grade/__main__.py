"""Command line of scripts/grade."""

import argparse
import os
import signal
import sys
from datetime import datetime
from pathlib import Path

from _arguments import positive

EPILOG = """\
A file is ada.ipynb or ada/02_manual_ddp.ipynb: its name or its folder's says whose it is. Of a
folder all notebooks below it are graded. From a JupyterHub's homes, scripts/cloud/collect makes
such a folder.

what it writes, where OUT is the table's name without .csv:
  OUT.csv           one row a student: points, and for each exercise points and the check's sentence
  OUT/NAME.html     feedback for each student
  OUT/class.html    points, students by exercise, which wrong answer how often (and class.svg)
  OUT/results.jsonl what was graded; a submission that is in it unchanged is not graded again
  OUT/similar.txt   with --similar: answers that are one another's code, or the solution's
  CANVAS, MOODLE    points of each notebook, as Canvas's gradebook and Moodle import them

with --roster (a CSV file with a header: name, id, email; also as Canvas or Moodle exports it) each
student of the roster has a row, also who handed in nothing. A submission is theirs if its file or
folder is named by their id, username, e-mail, what stands before the @ of it, or name. What is
nobody's stands at the end, with the reason.

exit code: 0 if all were graded; 1 if a file could not be read or a submission forged something; 2
if an argument or the roster is wrong; 3 where there is no bubblewrap, or it may not make
namespaces; 130 after an interrupt. What was done until then is in the files.

examples:
  scripts/grade submissions/ --out week2.csv
  scripts/grade ada.ipynb --only 2.1,2.3 --out ada.csv
  scripts/grade submissions/ --out week2.csv --roster class.csv --due 2026-12-01T23:59 \\
      --canvas for_canvas.csv
"""


def check(arguments: list) -> argparse.Namespace:
    """The parsed command line; exits with a sentence if it is wrong."""
    parser = argparse.ArgumentParser(
        prog="scripts/grade", formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Grade students' notebooks, each exercise in a process tree of its own.",
        epilog=EPILOG)
    parser.add_argument("given", nargs="+", metavar="FILE_OR_FOLDER", help="what to grade")
    parser.add_argument("--out", required=True, metavar="OUT.csv", help="the table to write")
    parser.add_argument("--only", metavar="N.M,N.M", type=lambda text: text.split(","),
                        help="these exercises alone")
    parser.add_argument("--points", metavar="N.M=P,...", type=_points, default={},
                        help="points of an exercise, instead of the notebook's: 2.4=3,2.5=0")
    parser.add_argument("--at-once", type=positive(int), metavar="N",
                        help="exercises graded at the same time (half of the cores)")
    parser.add_argument("--seconds", type=positive(int), metavar="S", default=180,
                        help="that one exercise may take (180)")
    parser.add_argument("--again", action="store_true",
                        help="grade also what OUT/results.jsonl has already")
    parser.add_argument("--roster", metavar="ROSTER.csv", help="who is in the class")
    parser.add_argument("--due", metavar="TIME", type=_time,
                        help="2026-12-01T23:59, in this machine's zone: what was handed in later "
                             "is marked; no points are taken")
    parser.add_argument("--canvas", metavar="FILE.csv", help="write what Canvas imports")
    parser.add_argument("--moodle", metavar="FILE.csv", help="write what Moodle imports")
    parser.add_argument("--book", metavar="URL", default="",
                        help="the web book that pages of feedback link to (this repository's on "
                             "GitHub Pages, where its address is known)")
    parser.add_argument("--similar", action="store_true",
                        help="list answers that are one another's code, or the solution's, in "
                             "OUT/similar.txt: to look at, no accusation")
    parser.add_argument("--unsafe", action="store_true",
                        help="without namespaces: a submission can then read and write what you "
                             "can, and reach the network")
    options = parser.parse_args(arguments)
    for path in options.given:
        if not os.path.lexists(path):
            parser.error(f"there is no {path}")
    if not options.out.endswith(".csv"):
        parser.error("--out names the table: it ends in .csv")
    if (options.canvas or options.moodle) and not options.roster:
        parser.error("--canvas and --moodle need a --roster: it has the ids that they go by")
    return options


def _points(text):
    found = {}
    for each in text.split(","):
        number, _, points = each.partition("=")
        try:
            found[number] = float(points)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{each!r} is not like 2.4=3") from None
    return found


def _time(text):
    for form in ("%Y-%m-%dT%H:%M", "%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M:%S"):
        try:
            return datetime.strptime(text, form)
        except ValueError:
            continue
    raise argparse.ArgumentTypeError(f"{text!r} is not like 2026-12-01T23:59")


def main() -> int:
    options = check(sys.argv[1:])
    from _grade import course

    signal.signal(signal.SIGTERM, _interrupt)
    return course.run(options, [Path(path) for path in options.given], Path(options.out))


def _interrupt(*_):
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
