"""Command line of scripts/on-gpu."""

import argparse
import os
import signal
import sys

from _arguments import positive

EPILOG = """\
what it writes into OUT:
  summary.md     one page: what agreed, what did not, predicted against measured, times
  results.json   the same as data; one_rank.json, faults.json, rates.json and bench_memory.json have
                 the rows
  NAME.log       all that a part printed

exit code: 0 if all parts that ran passed; 1 if one failed or took too long; 2 if there is no GPU,
a package is missing or an argument is wrong; 130 after an interrupt. There is a summary in every
case but 2.

The Python is $PYTHON, else that of .venv, else the one that is active; it needs torch >= 2.11,
transformers, matplotlib, cloudpickle, psutil and tqdm. The tests need pytest, too. Nothing is
installed or downloaded.

parts, the most valuable first; one that no longer fits into the minutes is skipped. Up to
bench-memory they take 6.5 minutes on an H200; with the solutions about 46 on 8 A100, with the last
one 56: an estimate.
"""


def check(arguments: list) -> argparse.Namespace:
    """The parsed command line; exits with a sentence if it is wrong."""
    from _on_gpu.parts import PARTS

    listed = "\n".join(f"  {part.name:23s}{part.what}" for part in PARTS)
    parser = argparse.ArgumentParser(
        prog="scripts/on-gpu", formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Run unattended, on a machine with GPUs, all that only a GPU can show.",
        epilog=EPILOG + listed)
    parser.add_argument("--minutes", type=positive(float), default=30, metavar="M",
                        help="for everything together (30)")
    parser.add_argument("--only", nargs="+", metavar="PART", choices=[part.name for part in PARTS],
                        help="these parts alone")
    parser.add_argument("--out", metavar="OUT",
                        help="a folder to write into (experiments/DATE-MACHINE)")
    parser.add_argument("--small", action="store_true",
                        help="small models and few cases, to try the command itself")
    return parser.parse_args(arguments)


def main() -> int:
    arguments = check(sys.argv[1:])
    from _on_gpu import session

    signal.signal(signal.SIGTERM, _interrupt)  # a rented machine that is taken back
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", WORKBOOK_PROGRESS="0",
                      MPLBACKEND="agg")
    return session.run(arguments)


def _interrupt(*_):
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
