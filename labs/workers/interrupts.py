"""Keeps an interrupt out of the moments in which it would break something."""

import contextlib
import signal
import threading


@contextlib.contextmanager
def deferred():
    """Defers SIGINT until the block exits, where KeyboardInterrupt is raised; `with released():`,
    of what it yields, re-enables it inside. Threads other than the main one never get a SIGINT."""
    if threading.current_thread() is not threading.main_thread():
        yield contextlib.nullcontext
        return
    # Not signal.pthread_sigmask: another thread, of which a kernel has many, would take the signal,
    # and Python would run the handler in the main thread all the same.
    received = []

    def defer(*_):
        received.append(True)

    before = signal.signal(signal.SIGINT, defer)
    before = signal.SIG_DFL if before is None else before  # None: a handler installed from C

    @contextlib.contextmanager
    def released():
        signal.signal(signal.SIGINT, before)
        try:
            if received:
                raise KeyboardInterrupt
            yield
        finally:
            signal.signal(signal.SIGINT, defer)

    try:
        yield released
    finally:
        signal.signal(signal.SIGINT, before)
    if received:
        raise KeyboardInterrupt
