"""Command line of scripts/preflight."""

import argparse
import json
import signal
import sys

EPILOG = """\
what the first column says:
  ok     as it should be
  note   it works; the line below says what to know
  STOP   the workbook will not run here; the line below says what to do
  -      nothing to look at on this machine

exit code: 0 if nothing is a STOP; 1 at the first STOP, after which no further row is tried; 2 if an
argument is wrong; 130 after an interrupt. A row that does not answer within its seconds is ended,
with all processes that it started.

examples:
  scripts/preflight            some 20 seconds on a laptop
  scripts/preflight --full     with a GPU's speed, bandwidths and listening sockets, some minutes
                               on a node
  scripts/preflight --json     one JSON object on stdout, the table on stderr
  scripts/preflight --full --json > node.json
                               what scripts/plan --calibrate node.json takes
"""


def check(arguments: list) -> argparse.Namespace:
    """The parsed command line; exits with a sentence if it is wrong."""
    parser = argparse.ArgumentParser(
        prog="scripts/preflight", formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Say whether this machine will run the workbook, and what to do where not.",
        epilog=EPILOG)
    parser.add_argument("--full", action="store_true",
                        help="also what takes longer: speed, bandwidths, sockets")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--keep-going", action="store_true", help="try all rows, also after a STOP")
    return parser.parse_args(arguments)


def main() -> int:
    arguments = check(sys.argv[1:])
    from _preflight import table

    signal.signal(signal.SIGTERM, _interrupt)  # what runs in a row is ended with it
    try:
        rows = table.run(arguments.full, arguments.keep_going,
                         sys.stderr if arguments.json else sys.stdout)
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return 130
    stopped = any(row["status"] == "STOP" for row in rows)
    if arguments.json:
        print(json.dumps({"ok": not stopped, "rows": rows}, indent=1))
    return 1 if stopped else 0


def _interrupt(*_):
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
