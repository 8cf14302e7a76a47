"""Command line of scripts/animate."""

import argparse
import sys
from pathlib import Path

ANIMATIONS = {
    "ring": "all-reduce round a ring: who holds what, step by step",
    "prefetch": "when ZeRO-3 gathers its layers, without and with prefetch",
    "deadlock": "one rank returns, the others wait, and launch says so",
}


def main() -> int:
    arguments = check(sys.argv[1:])
    from _animate import make  # after the check: it needs what set-up installs

    return make.make(arguments.only or list(ANIMATIONS), Path(arguments.out), arguments.ranks,
                     arguments.redraw)


def check(arguments: list) -> argparse.Namespace:
    """The parsed command line; exits with a sentence if it is wrong."""
    listed = "\n".join("  {:10s}{}".format(*pair) for pair in ANIMATIONS.items())  # noqa: UP032
    parser = argparse.ArgumentParser(
        prog="scripts/animate", formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Make the moving pictures of README and the web book: run on real ranks, then\n"
                    "draw frame by frame. Writes animated WebP files, a still of each as PNG for\n"
                    "readers who prefer no motion, and animations.json with their words.",
        epilog=f"animations:\n{listed}\n\nIt takes a few minutes. prefetch measures time: run it "
               "on a quiet machine.")
    parser.add_argument("--only", nargs="+", choices=list(ANIMATIONS), metavar="NAME",
                        help="these alone (default: all)")
    parser.add_argument("--out", metavar="FOLDER", default="experiments/reference/animations",
                        help="where to (default: %(default)s)")
    parser.add_argument("--ranks", type=int, choices=[3, 4], default=4,
                        help="of ring and deadlock (default: %(default)s)")
    parser.add_argument("--redraw", action="store_true",
                        help="run nothing: draw what FOLDER/recorded.json holds")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
