"""Keeps an interrupt out of the moments in which it would tear something apart."""

import contextlib
import signal
import threading


@contextlib.contextmanager
def held():
    """An interrupt that comes inside is raised at the end instead (in the main thread; others
    never get one)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came = []
    before = signal.signal(signal.SIGINT, lambda *_: came.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before if before is not None else signal.SIG_DFL)
    if came:
        raise KeyboardInterrupt
