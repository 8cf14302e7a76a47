"""scripts/lab and a real browser on it, for tests."""

import os
import re
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import leaks
import psutil

ROOT = Path(__file__).resolve().parents[1]
CHROMIUM = Path("/usr/bin/chromium")
FLAGS = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--disable-quic",
         "--no-first-run", "--disable-background-networking", "--disable-component-update",
         "--disable-sync"]
READY = """path => {
    const panel = window.jupyterapp?.shell.currentWidget;
    return panel?.context?.isReady && panel.context.path == path
        && panel.sessionContext.session?.kernel?.status == 'idle';
}"""
OPEN = "path => { window.jupyterapp.commands.execute('docmanager:open', {path}); }"
CELLS = """() => window.jupyterapp.shell.currentWidget.content.widgets.map(cell => ({
    kind: cell.model.type, source: cell.model.sharedModel.getSource(),
    outputs: cell.model.outputs?.toJSON() ?? [] }))"""
SELECT = """number => {
    const notebook = window.jupyterapp.shell.currentWidget.content;
    notebook.deselectAll();
    notebook.activeCellIndex = number;
    notebook.mode = 'command';
    return notebook.scrollToItem(number, 'center');
}"""
# Milliseconds between two looks. Without it the page is looked at before each frame, and so that
# there are frames, Chromium draws the page again and again while a notebook runs.
OFTEN, SELDOM = 50, 500
SAVED = "() => { window.jupyterapp.shell.currentWidget.context.model.dirty = false; }"
SHOWN = ".jp-NotebookPanel:not(.lm-mod-hidden)"
START = """command => {
    window.ended = false;
    window.jupyterapp.commands.execute(command).finally(() => { window.ended = true; });
}"""


class Lab:
    """scripts/lab on a copy of the notebooks, so that JupyterLab's autosave and its settings change
    nothing in the checkout."""

    def __init__(self, folder: Path):
        self.folder = folder
        for name in ("notebooks", "solutions"):
            shutil.copytree(ROOT / name, folder / name)
        _draw_all_cells(folder / "home")
        self._log = folder / "log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(self._command(folder), stdout=log, cwd=ROOT,
                                            stderr=subprocess.STDOUT, start_new_session=True,
                                            env=_environment(folder / "home"))

    @staticmethod
    def _command(folder):
        return ["scripts/lab", "--no-browser", "--port", str(_free_port()),
                f"--ServerApp.root_dir={folder}", "--LabApp.expose_app_in_browser=True",
                f"{folder}/notebooks/00_start_here.ipynb"]

    @property
    def address(self) -> str:
        """What it prints, with its token, once it serves there, which is a moment later."""
        leaks.until(lambda: self._serves() or self.process.poll() is not None, 120)
        if not self._serves():
            raise RuntimeError("scripts/lab did not start:\n" + self._log.read_text())
        return self._printed()

    def _serves(self):
        printed = self._printed()
        with socket.socket() as asking:
            return printed and not asking.connect_ex(("127.0.0.1", int(re.search(r":(\d+)/",
                                                                                 printed)[1])))

    def _printed(self):
        found = re.search(r"http://127\.0\.0\.1:\d+/lab\S*\?token=\w+", self._log.read_text())
        return found and found[0]

    @property
    def pid(self):
        return self.process.pid

    def close(self) -> list:
        """Ends it as a closed terminal would; the processes that had to be killed after that."""
        family = _family(self.pid)
        if self.process.poll() is None:
            os.killpg(self.pid, signal.SIGTERM)
        _, alive = psutil.wait_procs(family, timeout=20)
        for process in alive:
            process.kill()
        self.process.wait()
        return alive


def _family(pid):
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _environment(home):
    """Settings and kernels of whoever runs the tests play no part."""
    jupyter = {f"JUPYTER_{name}_DIR": str(home / name.lower())
               for name in ("CONFIG", "DATA", "RUNTIME")}
    lab = {f"JUPYTERLAB_{name}_DIR": str(home / name.lower())
           for name in ("SETTINGS", "WORKSPACES")}
    kept = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    path = os.pathsep.join(filter(None, [str(ROOT / "tests" / "fewer"), kept.get("PYTHONPATH")]))
    return {**kept, **jupyter, **lab, "IPYTHONDIR": str(home / "ipython"), "PYTHONPATH": path}


def _draw_all_cells(home):
    """JupyterLab's setting for it: else it draws those in sight only."""
    file = home / "settings" / "@jupyterlab" / "notebook-extension" / "tracker.jupyterlab-settings"
    file.parent.mkdir(parents=True)
    file.write_text('{"windowingMode": "none"}')


def opened(browser, lab: Lab):
    """The page that the printed address leads to."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(60_000)
    page.goto(lab.address)
    page.wait_for_function("window.jupyterapp?.shell.currentWidget", polling=OFTEN)
    return page


class Notebook:
    """A notebook in a tab of JupyterLab; the tab that is seen from now on."""

    def __init__(self, page, path: str):
        self.page, self._path = page, path
        self.show()

    def show(self) -> None:
        """Brings its tab to the front, opening it if needed."""
        self.page.evaluate(OPEN, self._path)
        self.page.wait_for_function(READY, arg=self._path, polling=OFTEN)

    def save(self) -> None:
        """Saves it, where it was opened just now: a save beside JupyterLab's own of every two
        minutes asks whether the file has changed on disk, and waits for an answer."""
        self.start("docmanager:save")
        self.wait()

    def close(self) -> None:
        """Ends its kernel and closes its tab, without saving."""
        self.start("notebook:shutdown-kernel")
        self.wait()
        self.page.evaluate(SAVED)  # else closing it asks whether to save
        self.start("application:close")
        self.wait()

    def cells(self) -> list:
        """The cells as JupyterLab holds them: {"kind", "source", "outputs"}."""
        return self.page.evaluate(CELLS)

    def find(self, text: str) -> int:
        """The number of the only code cell that contains `text`."""
        [number] = [number for number, cell in enumerate(self.cells())
                    if cell["kind"] == "code" and text in cell["source"]]
        return number

    def start(self, command: str) -> None:
        """Begins a command of JupyterLab; `wait` waits for its end."""
        self.page.evaluate(START, command)

    def wait(self, polling: int = OFTEN) -> None:
        timeout = 240_000  # of a whole notebook
        self.page.wait_for_function("window.ended", timeout=timeout, polling=polling)

    def press(self, command: str) -> None:
        """Clicks the button of the notebook's tool bar that stands for a command."""
        self.page.locator(f'{SHOWN} [data-command="{command}"]').click()

    def run_all(self) -> None:
        self.start("notebook:run-all-cells")
        self.wait(SELDOM)

    def start_cell(self, number: int) -> None:
        self.page.evaluate(SELECT, number)
        self.start("notebook:run-cell")

    def run_cell(self, number: int):
        """Runs a cell; its output, as seen on the page."""
        self.start_cell(number)
        self.wait()
        return self.output(number)

    def output(self, number: int):
        """The output of a cell, on the page."""
        return self.page.locator(f'{SHOWN} [data-windowed-list-index="{number}"] '
                                 ".jp-Cell-outputArea")

    def type(self, number: int, source: str) -> None:
        """Replaces what stands in a cell, with the keyboard."""
        self.page.evaluate(SELECT, number)
        self.page.locator(f'{SHOWN} [data-windowed-list-index="{number}"] '
                          ".cm-content").click()
        self.page.keyboard.press("Control+a")
        self.page.keyboard.insert_text(source)
