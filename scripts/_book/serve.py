"""Shows a folder as a web site on this machine alone."""

import functools
import http.server
from pathlib import Path


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def serve(folder: Path, port: int) -> None:
    """Serves `folder` on 127.0.0.1 until an interrupt."""
    handler = functools.partial(_Quiet, directory=str(folder))
    try:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)
    except OSError as error:
        print(f"Port {port} cannot be had ({error.strerror}): name another one, as in "
              "--serve 8001.")
        return
    with server:
        print(f"The book is at http://127.0.0.1:{port} until Ctrl-C.", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
