"""Keeps an interrupt out of the moments in which it would tear something apart."""

import contextlib
import signal
import threading


@contextlib.contextmanager
def held():
    """An interrupt that comes inside is raised at the end instead (in the main thread; others
    never get one). Yields a context manager to use inside: in it, interrupts are raised at once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield contextlib.nullcontext
        return
    came = []

    def hold(*_):
        came.append(True)

    before = signal.signal(signal.SIGINT, hold)
    before = signal.SIG_DFL if before is None else before

    @contextlib.contextmanager
    def released():
        signal.signal(signal.SIGINT, before)
        try:
            if came:
                raise KeyboardInterrupt
            yield
        finally:
            signal.signal(signal.SIGINT, hold)

    try:
        yield released
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt
