"""A live Jupyter kernel for tests, with a temporary directory of its own."""

import os
import queue
import shutil
import tempfile
import time

import pytest

KernelManager = pytest.importorskip("jupyter_client.manager").KernelManager


def disconnect(client):
    """Ends a client. One that is collected with its channels open waits for ever in zmq, in
    whatever test runs then."""
    client.stop_channels()
    client.context.destroy(linger=0)


class Kernel:
    """A kernel and what its cells print. temporary: where all its temporary files are."""

    def __init__(self, **environment):
        self.temporary = tempfile.mkdtemp(prefix="kernel-")
        self.manager = KernelManager(kernel_name="python3")
        variables = {name: value for name, value in os.environ.items()
                     if name != "PYTEST_CURRENT_TEST"}  # ipykernel behaves differently with it
        self.manager.start_kernel(env={**variables, "TMPDIR": self.temporary, **environment})
        self.client = self.manager.blocking_client()
        try:
            self.client.start_channels()
            self.client.wait_for_ready(timeout=60)
            self.pid = self.manager.provisioner.process.pid
        except BaseException:
            self.close()
            raise

    def start(self, code):
        """Begins to run a cell; `finish` waits for it."""
        self._message = self.client.execute(code)

    def finish(self, until=None, timeout=60):
        """(text printed, error text or None) of the running cell; with `until`, up to that text."""
        text, error, deadline = "", None, time.monotonic() + timeout
        while time.monotonic() < deadline:
            try:
                message = self.client.get_iopub_msg(timeout=1)
            except queue.Empty:
                continue
            if message["parent_header"].get("msg_id") != self._message:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                text += content["text"]
            elif kind in ("execute_result", "display_data"):
                text += content["data"].get("text/plain", "")
            elif kind == "error":
                error = "\n".join(content["traceback"])
            if (until and until in text) or (
                    kind == "status" and content["execution_state"] == "idle"):
                return text, error
        raise TimeoutError(text)

    def run(self, code, timeout=60):
        self.start(code)
        return self.finish(timeout=timeout)

    def close(self):
        disconnect(self.client)
        self.manager.shutdown_kernel(now=True)
        shutil.rmtree(self.temporary, ignore_errors=True)
