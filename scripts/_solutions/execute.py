"""Executes one notebook in a kernel of its own: a cell that fails or takes too long does not stop
the next. Run as a process of its own, because a kernel may take it down.

After each cell NN_name.json says how far it has come; NN_name.records.jsonl gets what checks and
pictures said (labs/checks/records.py); NN_name.ipynb is written in every case.
"""

import argparse
import json
import os
import time
from pathlib import Path

from _build import execute


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("notebook", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("cell_seconds", type=float)
    options = parser.parse_args()
    run = Run(options.notebook, options.out, options.cell_seconds)
    try:
        run.execute()
    finally:
        run.save()
    return int(bool(run.state["failed"]))


class Run:
    """One execution. state: what NN_name.json holds: cells, the one that runs, seconds by cell, and
    those that failed, as [cell, why]."""

    def __init__(self, notebook: Path, out: Path, cell_seconds: float):
        import nbformat

        self._path, self._out, self._cell_seconds = notebook, out, cell_seconds
        self._node = nbformat.read(notebook, as_version=4)
        for cell in self._node.cells:
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None
        code = [i for i, cell in enumerate(self._node.cells) if cell.cell_type == "code"]
        self._numbers = {index: number for number, index in enumerate(code, 1)}
        self.state = {"cells": len(code), "running": 0, "seconds": [], "failed": []}
        self._began = time.monotonic()

    def execute(self) -> None:
        """Runs all cells; what a cell raises stands in its output and in the state."""
        from nbclient import NotebookClient

        groups = []
        client = NotebookClient(
            self._node, kernel_name="python3", timeout=self._cell_seconds, allow_errors=True,
            interrupt_on_timeout=True, store_widget_state=False, record_timing=False,
            resources={"metadata": {"path": self._path.parent}},
            extra_arguments=["--log-level=ERROR"],
            on_notebook_start=lambda notebook: groups.append(client.km.provisioner.pgid),
            on_cell_start=self._begins, on_cell_executed=self._ended)
        client.log.setLevel("CRITICAL")
        failure = execute.run(client, groups, **self._records())
        if failure:
            self._failed(self.state["running"], "its kernel died" if "Dead" in
                         type(failure).__name__ else f"{type(failure).__name__}: {failure}")

    def _records(self) -> dict:
        path = self._out / f"{self._path.stem}.records.jsonl"
        path.unlink(missing_ok=True)
        return {"WORKBOOK_RECORDS": str(path)}

    def _begins(self, cell, cell_index):
        if cell_index in self._numbers:
            self.state["running"], self._began = self._numbers[cell_index], time.monotonic()
            self._write_state()

    def _ended(self, cell, cell_index, execute_reply):
        if cell_index not in self._numbers:
            return
        seconds = time.monotonic() - self._began
        self.state["seconds"].append(round(seconds, 2))
        for output in cell.outputs:
            if output.output_type == "error":
                self._failed(self._numbers[cell_index], self._why(output, seconds))
        self._write_state()

    def _why(self, output, seconds) -> str:
        if seconds >= self._cell_seconds:
            return f"interrupted after {self._cell_seconds / 60:g} minutes"
        first = (output.evalue.strip().splitlines() or [""])[0]
        return f"{output.ename}: {first}"

    def _failed(self, number, why):
        self.state["failed"].append([number, why])

    def _write_state(self):
        path = self._out / f"{self._path.stem}.json"
        new = path.with_suffix(".new")
        new.write_text(json.dumps(self.state))
        os.replace(new, path)  # a reader meanwhile sees a complete one

    def save(self) -> None:
        """Writes the notebook with what it has."""
        import nbformat

        for cell in self._node.cells:
            if cell.cell_type == "code":
                cell.outputs = [nbformat.from_dict(output) for output in execute.tidy(cell.outputs)]
        nbformat.write(self._node, self._out / self._path.name)
        self._write_state()


if __name__ == "__main__":
    raise SystemExit(main())
