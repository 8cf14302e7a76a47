"""torchft's lighthouse as a program that ends with the notebook's kernel: `lighthouse.py OPTIONS`,
those of `torchft_lighthouse`. Started by its path, because torchft reads the words after it."""

import ctypes
import signal
import sys


def main() -> int:
    """Is the lighthouse until it is killed."""
    sys.path.pop(0)  # this folder, which has modules of common names
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # when its parent ends, also by kill -9
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from torchft._torchft import lighthouse_main

    return lighthouse_main()


if __name__ == "__main__":
    sys.exit(main())
