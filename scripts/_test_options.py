"""The command line of scripts/test. Readable by Python 3.6: it answers before any set-up."""

import argparse
import os
import sys

EPILOG = """\
how long it takes, on 2 cores:
  scripts/test       the gate: {gate_minutes} minutes. Every notebook, executed; for each exercise
                     wrong answers and a right one; of what takes long, some of each kind
  --all              everything: {all_minutes} minutes
  --fast             {fast_minutes} minutes

examples:
  scripts/test                                    the gate, which CI runs
  scripts/test --since main                       the gate, and all that is reached by what was
                                                  changed since this commit
  scripts/test --all                              everything; renews tests/durations.json
  scripts/test --fast                             without slow and browser tests, few wrong answers
  scripts/test tests/workers                      the Python tests of one part of labs/
  scripts/test tests/workers/test_launch.py -k hang
  scripts/test notebooks/00_start_here.ipynb      one notebook, every cell executed
  scripts/test tests -- -x --pdb                  arguments for pytest come after --

environment:
  WORKBOOK_THIRD_PARTY=0   do not install DeepSpeed, JAX and torchft, which some tests need
"""
# Rounded, of whole runs on 2 cores in November 2026; the summary at the end of a run has its own.
GATE_MINUTES, ALL_MINUTES, FAST_MINUTES = 26, 60, 4


def check(arguments):
    """Exit with a sentence if the arguments are wrong; return them parsed.

    pytest's own arguments, those after --, stand in `extra`.
    """
    before, extra = arguments, []
    if "--" in arguments:
        before, extra = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
    parser = argparse.ArgumentParser(
        prog="scripts/test",
        description="Set up if needed, then run the tests in stages.",
        epilog=EPILOG.format(gate_minutes=GATE_MINUTES, all_minutes=ALL_MINUTES,
                             fast_minutes=FAST_MINUTES),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="*",
                        help="tests, or notebooks, to run whole; default: the gate")
    much = parser.add_mutually_exclusive_group()
    much.add_argument("--all", action="store_true", help="everything")
    much.add_argument("--since", metavar="COMMIT", help="besides the gate, all tests that "
                                                       "changes since then can reach")
    much.add_argument("--fast", action="store_true", help="no slow or browser tests, few wrong "
                                                          "answers, no notebooks")
    parser.add_argument("-k", metavar="EXPR", help="only tests whose name matches (as in pytest)")
    # Options may stand between paths; Python 3.6 cannot do that, and only has to answer --help.
    parse = getattr(parser, "parse_intermixed_args", parser.parse_args)
    options = parse(before)
    options.extra = extra
    if options.since and (options.paths or options.k):
        sys.exit("--since chooses the tests itself: name no paths beside it, and no -k.")
    if options.all and options.paths:
        sys.exit("Paths are run whole without --all: leave it out, or the paths.")
    absent = [path for path in options.paths if not os.path.exists(path.split("::")[0])]
    if absent:
        sys.exit("There is no {} in {}: check the path.".format(", ".join(absent), os.getcwd()))
    return options
