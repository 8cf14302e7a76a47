"""Runs one row's function and prints what it found as the last line of stdout."""

import importlib
import json
import sys

if __name__ == "__main__":
    module, function = sys.argv[1].split(".")
    found = getattr(importlib.import_module(f"_preflight.{module}"), function)()
    print(json.dumps(found.as_json()), flush=True)
