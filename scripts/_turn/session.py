"""One turn: waits for its GPUs, executes a copy of the notebook, and hands back what came of it."""

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import uuid
from pathlib import Path

import psutil
from _unattended import runner

from _turn import guard, report, shares
from _turn.queue import RUNNING, Queue, Refused, Ticket
from labs.words import counted

POLL = 0.5  # seconds between two looks at the queue
SAID_AGAIN = 60  # seconds after which a log hears that it still waits
LOOKS = 2.0  # seconds between two looks at the memory
LARGEST = 10**9  # bytes of a student's folder
# Results of earlier turns, versions and caches: no notebook reads them.
LEFT_OUT = ("*.executed.ipynb", "*.report.*", "*.old-*.ipynb", ".*", "__pycache__")


def status(options) -> int:
    """Prints who runs and who waits."""
    node, tickets = shares.node(), Queue(Path(options.queue)).living()
    running, waiting = ([one for one in tickets if (one["state"] == RUNNING) is wanted]
                        for wanted in (True, False))
    busy = sum(len(one["on"]) for one in running)
    print(f"{node.in_words(len(node.names))}: {busy} in use. {counted(len(waiting), 'notebook')}"
          f" waiting. Queue: {options.queue}")
    for one in running:
        print(f"  runs       {one['user']:12s} {one['notebook']:26s} {', '.join(one['on'])}, "
              f"{(time.time() - one['began']) / 60:.1f} of at most {one['minutes']:g} minutes")
    for place, one in enumerate(waiting, 1):
        print(f"  waits {place:3d}  {one['user']:12s} {one['notebook']:26s} "
              f"for {node.in_words(one['count'])}, {_minutes(one['since'])} so far")
    return 0


def run(options) -> int:
    """Runs one turn; returns the exit code."""
    notebook, node = Path(options.notebook).resolve(), shares.node()
    out = Path(options.out).resolve() if options.out else notebook.parent
    if options.gpus > len(node.names):
        raise Refused(f"--gpus {options.gpus} is more than this node has: "
                      f"{node.in_words(len(node.names))}.")
    _require_notebook(notebook)
    _require_writable(out)
    queue = Queue(Path(options.queue).absolute())
    with tempfile.TemporaryDirectory(prefix="turn-", ignore_cleanup_errors=True) as temporary:
        # Copied before it waits: what runs is the notebook as it was handed in.
        copy = _copied(notebook, Path(temporary) / "copy")
        results = Path(temporary) / "results"
        results.mkdir()
        ticket = Ticket(queue, notebook.stem, options.gpus, options.minutes)
        try:
            began = time.monotonic()
            names = _wait(ticket, node, began)
            waited = time.monotonic() - began
            turn = Turn(copy, results, node, names, options.minutes)
            turn.run(ticket)
        finally:
            ticket.give_back()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # what there is, is handed back
        found = report.found(notebook.stem, turn, waited, options.minutes)
        paths = report.hand_back(found, results, copy, out)
    print("\n".join([report.text(found), "", *map(str, paths)]), flush=True)
    return report.exit_code(found)


def _require_notebook(path):
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    except OSError as error:
        raise Refused(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError):
        cells = None
    if not isinstance(cells, list):
        raise Refused(f"{path} is no notebook: save it again in JupyterLab.")


def _require_writable(out):
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refused(f"The folder {out} cannot be made: {error.strerror}.") from None
    if not os.access(out, os.W_OK | os.X_OK):
        raise Refused(f"You may not write to {out}: name another folder by --out.")


def _copied(notebook, to) -> Path:
    """The notebook in a copy of its folder; later notebooks read the earlier ones beside them."""
    size = 0
    for folder, folders, files in os.walk(notebook.parent):
        folders[:] = [each for each in folders if not each.startswith(".")]
        with contextlib.suppress(OSError):
            size += sum(os.lstat(os.path.join(folder, each)).st_size for each in files)
        if size > LARGEST:
            raise Refused(f"The folder {notebook.parent} has more than {LARGEST / 1e9:g} GB, and "
                          "is copied: put the notebook into a folder of its own.")
    try:
        shutil.copytree(notebook.parent, to, symlinks=True,
                        ignore=shutil.ignore_patterns(*LEFT_OUT))
        shutil.copyfile(notebook, to / notebook.name)  # also where it is a link
    except (OSError, shutil.Error) as error:
        raise Refused(f"The folder {notebook.parent} could not be copied: {error}.") from None
    return to / notebook.name


def _wait(ticket, node, began) -> list[str]:
    """The shares' names, once the ticket has them; says meanwhile where it stands."""
    said, last = None, began
    while (names := ticket.take(node.names)) is None:
        now = time.monotonic()
        if said is None or now - last > 5:
            place = ticket.place()
            if place != said or now - last > SAID_AGAIN or sys.stdout.isatty():
                line = (f"Place {place} in the queue, {(now - began) / 60:.1f} minutes so far."
                        if place > 1 else f"Next in the queue, until {_free(ticket, node)}; "
                                          f"{(now - began) / 60:.1f} minutes so far.")
                print(f"\r\x1b[K{line}" if sys.stdout.isatty() else line, flush=True,
                      end="" if sys.stdout.isatty() else "\n")
                said, last = place, now
        time.sleep(POLL)
    print("\r\x1b[K" * sys.stdout.isatty() + f"Runs on {', '.join(names)}.", flush=True)
    return names


def _free(ticket, node) -> str:
    verb = "is" if ticket.count == 1 else "are"
    return f"{node.in_words(ticket.count)} {verb} free"


def _minutes(since) -> str:
    return f"{(time.time() - since) / 60:.1f} minutes"


class Turn:
    """A notebook that has its shares. result: how it ended; memory and gpu_memory: peak bytes on
    the host and on the GPU with most of them in use, 0 where nothing told."""

    def __init__(self, copy: Path, results: Path, node: shares.Node, names: list[str],
                 minutes: float):
        self.copy, self.results, self.node, self.names = copy, results, node, names
        self.seconds = 60 * minutes
        self.memory = self.gpu_memory = 0
        self._looked = -LOOKS
        self.result = runner.Result(copy.stem, runner.INTERRUPTED, why="interrupted")

    def run(self, ticket: Ticket) -> None:
        """Executes the notebook; when this returns or raises, nothing that it started is left."""
        identity = uuid.uuid4().hex
        watching = guard.start(identity, ticket.descriptors, self.results.parent)
        # After the guard has started, which must not have them: the executor inherits them, and
        # so do the kernel and all ranks.
        os.environ |= self.node.variables(self.names) | {guard.MARK: identity}
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, self.node.cores_of(self.names))
        # A cell may take all minutes: there is no limit for one alone.
        command = [sys.executable, "-P", "-m", "_solutions.execute", str(self.copy),
                   str(self.results), str(10 * self.seconds)]
        began = time.monotonic()
        try:
            self.result = runner.run(self.copy.stem, command, self.results / "log", self.seconds,
                                     self.copy.parent, self._look)
        except KeyboardInterrupt:
            self.result.seconds = time.monotonic() - began
        finally:
            guard.end(watching)

    def _look(self, elapsed):
        if elapsed - self._looked < LOOKS:
            return
        self._looked = elapsed
        self.memory = max(self.memory, _tree_memory())
        if self.node.gpus:
            self.gpu_memory = max(self.gpu_memory, shares.used_memory(self.names))


def _tree_memory() -> int:
    """Bytes of all processes below this one. Pages that several share count once (PSS); where the
    system has no such number, once for each process (RSS)."""
    total = 0
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, OSError):
            memory = one.memory_full_info()
            total += getattr(memory, "pss", memory.rss)
    return total
