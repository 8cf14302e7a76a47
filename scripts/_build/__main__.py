"""Entry point of `scripts/build`: run as `python scripts/_build`."""

import signal
import sys
from pathlib import Path

# jsonschema builds a URI grammar on import if this optional package is there: one second, for a
# format no notebook has. Hidden in this process only.
sys.modules["rfc3987_syntax"] = None
sys.path[0] = str(Path(__file__).resolve().parents[1])

from _build.command import main  # noqa: E402

signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the kernel too, as ^C does
sys.exit(main())
