"""Runs a solution notebook in a fresh kernel and tidies what it printed and drew."""

import contextlib
import html
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CELL_SECONDS = 120
WIDGET = "application/vnd.jupyter.widget-view+json"
FOLDED = "<details><summary>The picture in words</summary>"
NO_PICTURE = "[interactive: run this cell in JupyterLab]"
CONTROL_CODES = re.compile(r"\x1b\[[0-9;?]*[A-HJKSTfhl]")
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
PROGRESS_BAR = re.compile(r"^\s*(.*:\s*)?(\d+%\||\d+\w* ?\[[\d:]+, )")


class CellFailed(Exception):
    """A cell raised, ran too long, or lost its kernel: (index of the cell, line in it, why)."""


def execute(nb: dict, folder: Path):
    """Run the notebook in `folder` and return it with tidy outputs; raises CellFailed.

    The kernel is the `python3` of the running environment. It is shut down in every case.
    """
    import nbformat
    from nbclient import NotebookClient

    node, running, groups = nbformat.from_dict(_joined(nb)), [], []
    client = NotebookClient(
        node,
        kernel_name="python3",
        timeout=CELL_SECONDS,
        resources={"metadata": {"path": folder}},
        on_notebook_start=lambda notebook: groups.append(client.km.provisioner.pgid),
        on_cell_start=lambda cell, cell_index: running.append(cell_index),
        extra_arguments=["--log-level=ERROR"],
        force_raise_errors=True,
        store_widget_state=False,
        record_timing=False,
    )
    client.log.setLevel("CRITICAL")
    failure = run(client, groups)
    if failure:
        index = running[-1] if running else 0
        raise CellFailed(index, *_explained(failure, node, index)) from None
    return _with_outputs(nb, node)


def run(client, groups: list[int], **variables: str) -> BaseException | None:
    """Run to the end; returns the exception of a cell or kernel that failed, or None.

    In a thread, because in the main thread nbclient would take ^C for itself. `groups` gets the
    kernel's process group; whatever is left of it afterwards is killed. variables: for the kernel.
    """
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(client.execute, env=_environment() | variables)
        try:
            return run.exception()
        finally:
            while not run.done():
                _kill(groups)
                time.sleep(0.1)
            _kill(groups)


def _kill(groups):
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def tidy(outputs):
    """The outputs as a code host can show them.

    What went to stderr stands in one block, everything that was overwritten (progress bars) shows
    its last state, a widget is replaced by its picture, its table, or a sentence, and below each
    picture stands what it shows. Tidied outputs stay as they are.
    """
    merged = []
    for output in outputs:
        if output["output_type"] == "stream":
            _append_stream(merged, output)
        elif "data" not in output or _replace_widget(output["data"]):
            merged.append(output)
    for output in merged:
        if output["output_type"] == "stream":
            output["text"] = last_state(output["text"])
    kept = [output for output in merged if output.get("text", "-") and not _is_folded(output)]
    return [shown for output in kept for shown in (output, *_in_words(output))]


def _is_folded(output):
    """Whether an earlier call has added it."""
    return "".join(output.get("data", {}).get("text/html", "")).startswith(FOLDED)


def _in_words(output):
    """What a saved picture shows, folded below it: JupyterLab and code hosts show an image/png
    without any alternative text. As HTML alone: who shows plain text has it from the picture."""
    data = output.get("data", {})
    if "image/png" not in data or "text/html" in data:
        return []
    words = "".join(data.get("text/plain", ""))
    lines = "<br>".join(html.escape(line) for line in words.splitlines())
    return [{"output_type": "display_data", "metadata": {},
             "data": {"text/html": f"{FOLDED}{lines}</details>"}}]


def last_state(text):
    """The text as it stands on a terminal after carriage returns overwrote parts of it."""
    lines = CONTROL_CODES.sub("", text.replace("\r\n", "\n")).split("\n")
    return "\n".join(_overwritten(line) if "\r" in line else line for line in lines)


def _overwritten(line):
    state = ""
    for part in line.split("\r"):
        state = part + state[len(part) :]
    return state.rstrip()


def _append_stream(merged, output):
    """Join it to the stream just before; stderr, which comes asynchronously, to any earlier."""
    others = [o for o in merged if o.get("name") == output["name"]]
    if others and (output["name"] == "stderr" or merged[-1] is others[-1]):
        others[-1]["text"] += output["text"]
    else:
        merged.append(dict(output))


def _replace_widget(data):
    """Take the live view out of the data; False if nothing worth showing is left."""
    # A code host shows HTML before a PNG, and takes the image in the HTML out.
    if "image/png" in data and "".join(data.get("text/html", "")).startswith("<img "):
        del data["text/html"]
    if data.pop(WIDGET, None) is None or set(data) - {"text/plain"}:
        return bool(data)
    if PROGRESS_BAR.match("".join(data.get("text/plain", ""))):
        return False
    data["text/plain"] = NO_PICTURE
    return True


def _joined(nb):
    """nbclient wants each source as one string, the file has a list of lines."""
    return nb | {"cells": [c | {"source": "".join(c["source"])} for c in nb["cells"]]}


def _with_outputs(nb, node):
    """The notebook with the executed one's outputs, laid out as nbformat writes them."""
    import nbformat
    from nbformat.v4.rwbase import split_lines

    for run in node["cells"]:
        if run["cell_type"] == "code":
            run["outputs"] = [nbformat.from_dict(o) for o in tidy(run["outputs"])]
    cells = []
    for cell, run in zip(nb["cells"], split_lines(node)["cells"], strict=True):
        new = {key: run[key] for key in ("outputs", "execution_count") if key in cell}
        cells.append(cell | new)
    return nb | {"cells": cells}


def _environment():
    # ipykernel stops capturing what child processes print when pytest's variable is set.
    kept = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
    fixed = {"PYTHONHASHSEED": "0", "PYDEVD_DISABLE_FILE_VALIDATION": "1", "WORKBOOK_PROGRESS": "0"}
    return kept | fixed


def _explained(failure, node, index):
    """(line of the cell, from 0, what happened in words)."""
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    if isinstance(failure, CellExecutionError):
        return _line(failure.traceback, node, index), _reason(failure)
    if isinstance(failure, CellTimeoutError):
        return 0, f"it ran longer than {CELL_SECONDS} s"
    if isinstance(failure, DeadKernelError):
        return 0, "its kernel died"
    return 0, f"no kernel: {failure}"


def _line(trace, node, index):
    """The line of the cell, from 0, where its exception came up: its deepest frame in the cell."""
    count = sum(cell["cell_type"] == "code" for cell in node["cells"][: index + 1])
    lines = re.findall(rf"Cell In\[{count}\], line (\d+)", COLOURS.sub("", trace or ""))
    return int(lines[-1]) - 1 if lines else 0


def _reason(error):
    text = COLOURS.sub("", error.evalue or "").strip().replace("\n", "\n    ")
    return f"{error.ename}: {text}" if text else error.ename
