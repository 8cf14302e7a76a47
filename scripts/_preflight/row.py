"""Runs one row's function and prints what it found as the last line of stdout."""

import importlib
import json
import subprocess
import sys

from _preflight.found import Found, stop

DRIVER = ("The driver does not answer: look at nvidia-smi and dmesg, then restart the machine or "
          "rent another one.")


def found_by(name: str) -> Found:
    """What the function "module.function" of this package finds."""
    module, function = name.split(".")
    try:
        return getattr(importlib.import_module(f"_preflight.{module}"), function)()
    except subprocess.TimeoutExpired as error:
        return stop(f"{' '.join(error.cmd)} did not answer within {error.timeout:g} s", DRIVER)


if __name__ == "__main__":
    print(json.dumps(found_by(sys.argv[1]).as_json()), flush=True)
