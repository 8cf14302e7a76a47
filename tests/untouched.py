"""A plugin for the stage of scripts/test that runs notebooks, with two runners.

Solutions run under nbval, cell by cell: what their checks say is compared with what the notebook
holds. Untouched student notebooks run under nbclient, which the builder uses too. nbval passes a
cell that ends in an unknown %magic, because no error is sent then, only a reply; nbclient does not.
Of solutions this plugin rejects it. What an untouched notebook may say, the browser test asks, too:
its cells end without a word on stderr, and its checks say that they wait."""

import functools
import re
from pathlib import Path

import pytest

CHECK = re.compile(r"^lab\.check_\w+\(", re.MULTILINE)
BUSY = re.compile(r"^○ Exercise \d+\.\d+  cannot be judged now")
WAITS = re.compile(r"^○ Exercise \d+\.\d+  (is waiting|waits for)")
USAGE = re.compile(r"^UsageError: ", re.MULTILINE)
DIED = "Kernel died before replying"  # of jupyter_client, before the first cell
STARTS = 3
STUDENTS = "notebooks"  # the folder of the untouched ones
CELL_SECONDS = 300


def pytest_configure(config):
    from nbval import kernel

    kernel.start_new_kernel = started_again(kernel.start_new_kernel)


def started_again(start):
    """A function that starts a kernel, which is called again where the kernel ended before its
    first cell. jupyter_client chooses ports that are free, and until the kernel binds them any
    connection of another test's ranks can take one."""
    @functools.wraps(start)
    def wrapped(*arguments, **options):
        for left in reversed(range(STARTS)):
            try:
                return start(*arguments, **options)
            except RuntimeError as error:
                if DIED not in str(error) or not left:
                    raise

    return wrapped


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path, parent):
    found = yield
    if file_path.suffix == ".ipynb" and file_path.parent.name == STUDENTS:
        return [Untouched.from_parent(parent, path=file_path)]  # in the place of nbval's
    return found


class Untouched(pytest.File):
    """A student notebook."""

    def collect(self):
        yield WholeRun.from_parent(self, name="untouched")


class WholeRun(pytest.Item):
    """All its cells in one kernel, under nbclient."""

    def runtest(self):
        import nbformat

        for _ in range(STARTS):
            notebook = nbformat.read(self.path, as_version=4)
            failure = execute(notebook, self.path.parent)
            if DIED not in str(failure):  # see started_again
                break
        cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
        for cell in cells:
            if cell.execution_count:  # a cell after the one that failed has none
                judge(cell.source, cell.outputs)
        if failure:
            raise AssertionError(f"{type(failure).__name__}: {failure}")
        assert all(cell.execution_count for cell in cells)

    def repr_failure(self, excinfo, style=None):
        return str(excinfo.value)  # the cell and what it said; our own stack says nothing

    def reportinfo(self):
        return self.path, None, self.name


def execute(notebook, folder: Path) -> BaseException | None:
    """Runs a notebook; returns what ended the run before its last cell. Outputs of an earlier run
    are dropped."""
    from _build.execute import run
    from nbclient import NotebookClient

    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    groups: list[int] = []
    client = NotebookClient(
        notebook, kernel_name="python3", timeout=CELL_SECONDS, force_raise_errors=True,
        store_widget_state=False, resources={"metadata": {"path": folder}},
        extra_arguments=["--log-level=ERROR"],
        on_notebook_start=lambda notebook: groups.append(client.km.provisioner.pgid))
    client.log.setLevel("CRITICAL")
    return run(client, groups)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    try:
        result = yield
    except Exception:
        # A check that measures on a busy machine says so, and judges nothing: the builder, which
        # runs alone, has seen it pass (tests/test_notebooks.py).
        if any(BUSY.match(text) for text in texts_of(getattr(item, "test_outputs", None) or ())):
            pytest.skip(f"the machine was too busy for this check\n{item.cell.source}")
        raise
    if hasattr(item, "test_outputs"):  # nbval's: of a solution
        reject_unknown_magics(item.cell.source, item.test_outputs or ())
    return result


def reject_unknown_magics(source: str, outputs: list) -> None:
    """Raises AssertionError where a cell ended in a %magic that IPython does not have."""
    said = [output.text for output in outputs if output.get("name") == "stderr"]
    assert not any(map(USAGE.search, said)), f"{said}\n{source}"


def judge(source: str, outputs: list) -> None:
    """Raises AssertionError where a cell of an untouched notebook put out what it should not."""
    errors = [output.text for output in outputs if output.get("name") == "stderr"]
    texts = texts_of(outputs)
    assert not errors, f"a cell wrote to stderr: {errors}\n{source}"
    assert not any("Traceback" in text for text in texts), f"a traceback\n{source}"
    if CHECK.search(source):
        assert [text for text in texts if WAITS.match(text)] == texts, f"{texts}\n{source}"


def texts_of(outputs) -> list[str]:
    """The text of each output of a cell."""
    return [output.text if "text" in output else output.get("data", {}).get("text/plain", "")
            for output in outputs]
