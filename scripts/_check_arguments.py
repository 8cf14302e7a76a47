"""Let a command's parser answer --help and bad arguments before any set-up. Python 3.6.

Usage: _check_arguments.py MODULE ARGUMENTS, where MODULE.check(arguments) exits if it objects.
"""

import importlib
import sys

ANSWERED = 100  # the exit code that says: --help was answered, there is nothing more to do

try:
    importlib.import_module(sys.argv[1]).check(sys.argv[2:])
except SystemExit as exit_:
    if exit_.code:
        raise
    sys.exit(ANSWERED)
