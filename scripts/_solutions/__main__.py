"""Command line of scripts/solutions."""

import argparse
import os
import re
import signal
import sys

import _notebooks
from _arguments import positive

EPILOG = """\
what it writes into OUT:
  report.html    one page: the machine, what passed, minutes, cost, charts, predicted, measured
  results.json   the same as data: every metric that the labs return, with its unit
  NN_name.ipynb  each notebook as it was executed, also where a cell failed
  NN_name.log    what went wrong outside of cells

exit code: 0 if every notebook passed; 1 if one failed, took too long or was left out; 2 if an
argument is wrong; 130 after an interrupt. There is a report in every case but 2.

examples:
  scripts/solutions                                    everything
  scripts/solutions --only 03,04                       two of them
  scripts/solutions --budget 10$ --dollars-per-hour 22.32
  scripts/solutions --resume experiments/2026-11-22-8x-A100-SXM4-80GB
  scripts/solutions --reference        on a quiet machine: renews experiments/reference/laptop
"""


def check(arguments: list) -> argparse.Namespace:
    """The parsed command line; exits with a sentence if it is wrong."""
    parser = argparse.ArgumentParser(
        prog="scripts/solutions", formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Run every solution unattended, and write a report.", epilog=EPILOG)
    parser.add_argument("--only", type=_numbers, metavar="NN,NN", help="these notebooks alone")
    parser.add_argument("--preset", choices=["laptop", "one-gpu", "node"],
                        help="sizes of another machine")
    parser.add_argument("--ranks", type=positive(int), metavar="N",
                        help="ranks instead of the preset's")
    parser.add_argument("--minutes", type=positive(float), metavar="M",
                        help="for everything together")
    parser.add_argument("--cell-minutes", type=positive(float), default=15, metavar="M",
                        help="for one cell (15); it is then interrupted, and the next one runs")
    parser.add_argument("--dollars-per-hour", type=_dollars, metavar="D",
                        help="what this machine costs")
    parser.add_argument("--budget", type=_dollars, metavar="D",
                        help="dollars, as in 10$: begin nothing that would cost more; with "
                             "--resume those of the runs before count, too")
    parser.add_argument("--out", metavar="OUT",
                        help="a folder to write into (experiments/DATE-MACHINE)")
    parser.add_argument("--resume", metavar="OUT",
                        help="go on in this folder: what passed there is not run again; its "
                             "--note and --dollars-per-hour stay where none is given")
    parser.add_argument("--note", metavar="TEXT",
                        help="stands in the report, as what else the machine was doing")
    parser.add_argument("--reference", action="store_true",
                        help="if all pass, keep this run as the reference for this kind of machine")
    parser.add_argument("--no-preflight", action="store_true",
                        help="do not look at the machine first")
    options = parser.parse_args(arguments)
    if options.budget and not options.dollars_per_hour:
        parser.error("--budget needs --dollars-per-hour: what does this machine cost?")
    if options.reference and (options.only or options.preset or options.ranks):
        parser.error("--reference is a run of every notebook in this machine's own sizes: leave "
                     "--only, --preset and --ranks out")
    if options.out and options.resume:
        parser.error("--out and --resume name the same thing: give one of them")
    if options.resume and not os.path.isdir(options.resume):
        parser.error(f"--resume: there is no folder {options.resume}")
    return options


def _numbers(text):
    found = text.split(",")
    for each in found:
        if not re.fullmatch(_notebooks.NUMBER, each):
            raise argparse.ArgumentTypeError(
                f"{each} is no notebook's number: give two digits, as in 03,04, and "
                "perhaps a letter")
    return found


def _dollars(text):
    return positive(float)(text.strip("$ "))


def main() -> int:
    options = check(sys.argv[1:])
    from _solutions import session

    signal.signal(signal.SIGTERM, _interrupt)  # a rented machine that is taken back
    return session.run(options)


def _interrupt(*_):
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
