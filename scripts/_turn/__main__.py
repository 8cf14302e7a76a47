"""Command line of scripts/turn. Python 3.6 reads this file too: it answers --help before set-up."""

import argparse
import os
import signal
import sys

from _arguments import positive

# Slurm numbers the GPUs of every job from 0, and has its own queue: a job has one of its own.
QUEUE = "-".join(["/tmp/workbook-queue"] + [os.environ[name] for name in ("SLURM_JOB_ID",)
                                            if name in os.environ])
EPILOG = """\
It waits until all who came before have their GPUs, takes K that are free, and executes a copy of
NOTEBOOK's folder there: CUDA_VISIBLE_DEVICES names the K GPUs, and the cores are divided like the
GPUs. A machine without GPUs is divided by its cores, so that this can be tried on a laptop. After
M minutes the notebook and all its ranks are ended.

what it writes into OUT, in every case:
  NAME.executed.ipynb    the notebook with all outputs there were
  NAME.report.html       what passed, minutes used and waited, GPUs, peak memory
  NAME.report.txt, .json the same as text and as data

QUEUE is a folder on the node's own disk that all accounts may write to; WORKBOOK_QUEUE names
another than /tmp/workbook-queue. In a job of Slurm, which queues by itself, it is the job's own.
To keep a GPU out of the queue: flock QUEUE/gpu-7.lock sleep infinity.

exit code: 0 if the notebook ran to its end; 1 if a cell raised or the kernel died (the other cells
ran); 124 if its minutes were over; 2 if something that was given is wrong; 130 after an interrupt.

examples:
  scripts/turn work/02_manual_ddp.ipynb
  scripts/turn work/06_scaling.ipynb --gpus 4 --minutes 15
  scripts/turn --status                     who runs, and who waits
"""


def check(arguments):
    """The parsed command line; exits with a sentence if it is wrong."""
    parser = argparse.ArgumentParser(
        prog="scripts/turn", formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Run a notebook on K of this node's GPUs for at most M minutes, when it is its "
                    "turn.", epilog=EPILOG)
    parser.add_argument("notebook", nargs="?", metavar="NOTEBOOK", help="what to run")
    parser.add_argument("--gpus", type=positive(int), default=1, metavar="K",
                        help="GPUs at the same time (1)")
    parser.add_argument("--minutes", type=positive(float), default=10, metavar="M",
                        help="from the moment that it gets its GPUs (10)")
    parser.add_argument("--queue", metavar="QUEUE",
                        default=os.environ.get("WORKBOOK_QUEUE") or QUEUE,
                        help="the folder that all accounts share (%(default)s)")
    parser.add_argument("--out", metavar="OUT", help="where the results go (NOTEBOOK's folder)")
    parser.add_argument("--status", action="store_true", help="say who runs and who waits")
    options = parser.parse_args(arguments)
    if bool(options.notebook) == options.status:
        parser.error("give one NOTEBOOK, or --status")
    if options.notebook and not os.path.isfile(options.notebook):
        parser.error(f"there is no notebook {options.notebook}")
    if options.notebook and not options.notebook.endswith(".ipynb"):
        parser.error(f"{options.notebook} is no notebook: its name does not end in .ipynb")
    return options


def main():
    """Runs the turn, or says who has one; returns the exit code."""
    options = check(sys.argv[1:])
    from _turn import session
    from _turn.queue import Refused

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)  # a terminal that closes ends the turn, too
    try:
        return session.status(options) if options.status else session.run(options)
    except Refused as error:
        print(f"scripts/turn: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return 130


def _interrupt(*_):
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
