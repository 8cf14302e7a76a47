"""JupyterLab as `scripts/lab` starts it, in a real browser: what a student sees and does."""

import base64
import io
import re

import leaks
import nbformat
import page_faults
import pytest
from browsing import CHROMIUM, FLAGS, ROOT, Lab, Notebook, opened
from PIL import Image
from untouched import judge

api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = [pytest.mark.browser, pytest.mark.skipif(
    not CHROMIUM.exists(), reason=f"there is no {CHROMIUM}: install the system's chromium")]

NAMES = sorted(path.stem for path in (ROOT / "solutions").glob("*.ipynb"))
SCREENSHOTS = ROOT / "experiments" / "browser"
# Where a right answer is typed: notebook, exercise, its check, and a picture of what was built.
TYPED = [
    ("00_start_here", "# Exercise 0.2: all-reduce from reduce-scatter", "lab.check_all_reduce(",
     "lab.two_steps("),
    ("02_manual_ddp", "# Exercise 2.3: after backward", "lab.check_average_gradients(",
     "lab.show_gradients("),
    ("03_zero_stages", "# Exercise 3.1: cut a flat tensor", "lab.check_cut(", "lab.show_owners("),
]
ENDLESS = """import time

def endless():
    print("working")
    time.sleep(600)

launch(endless, ranks=2)
"""
MEMORY = "import labs\n\nlabs.plan(only=\"memory\")"
RESTARTED = "Canceled future for"  # JupyterLab's own: a kernel was restarted while it was asked
RESTART = "() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()"


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    running = Lab(tmp_path_factory.mktemp("lab"))
    yield running
    assert not running.close()


@pytest.fixture(scope="module")
def page(lab):
    """JupyterLab as the address that scripts/lab prints shows it."""
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        yield opened(browser, lab)
        browser.close()


@pytest.fixture(autouse=True)
def console(page):
    """Fails a test in which the page writes an error to its console."""
    errors = []

    def written(message):
        if message.type == "error" and RESTARTED not in message.text:
            errors.append(message.text)

    def raised(error):
        if RESTARTED not in str(error):
            errors.append(str(error))

    page.on("console", written)
    page.on("pageerror", raised)
    yield
    page.remove_listener("console", written)
    page.remove_listener("pageerror", raised)
    assert errors == []


@pytest.fixture(scope="module")
def untouched(page):
    """untouched(name): the notebook of a student who only chose Run All Cells; it runs once."""
    opened_before = {}

    def run(name):
        if name not in opened_before:
            notebook = opened_before[name] = Notebook(page, f"notebooks/{name}.ipynb")
            notebook.run_all()
            notebook.untouched = notebook.cells()
        opened_before[name].show()
        return opened_before[name]

    return run


def write_notebook(path, source, *outputs, more=()):
    """A notebook with one cell, with the outputs of which these are the data, and more cells."""
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    shown = [nbformat.v4.new_output("display_data", data) for data in outputs]
    cells = [nbformat.v4.new_code_cell(source, outputs=shown),
             *map(nbformat.v4.new_code_cell, more)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), path)


def text_of(cell) -> str:
    """All that a cell has put out."""
    parts = [part for output in cell["outputs"] for part in
             (output.get("text", ""), output.get("data", {}).get("text/plain", ""))]
    return "\n".join("".join(part) for part in parts)


def assert_untouched(cells):
    """Every cell ran without an error, every check and every gap says that it is waiting."""
    code = [cell for cell in cells if cell["kind"] == "code"]
    for cell in code:
        # a line of progress that was cleared is still there, empty
        shown = [output for output in cell["outputs"]
                 if "data" not in output or any(output["data"].values())]
        judge(cell["source"], [nbformat.from_dict(output) for output in shown])
    wrong = [cell for cell in code for output in cell["outputs"]
             if output["output_type"] == "error" or output.get("name") == "stderr"]
    assert not wrong
    sources = "\n".join(cell["source"] for cell in code)
    printed = "\n".join(text_of(cell) for cell in code)
    gaps = set(re.findall(r'NotImplementedError\("Exercise ([\d.]+)"\)', sources))
    waiting = set(re.findall(r"○ Exercise ([\d.]+)  (?:is waiting|waits)", printed))
    exercises = set(re.findall(r"^# Exercise (\d+\.\d+)", sources, re.M))
    assert gaps <= exercises and waiting == exercises
    assert printed.count("○ no guess yet") == sources.count("my_guess = ...") > 0


def answer(name, beginning):
    """The source of the solution's cell that begins so."""
    solution = nbformat.read(ROOT / "solutions" / f"{name}.ipynb", as_version=4)
    [source] = [cell.source for cell in solution.cells if cell.source.startswith(beginning)]
    return source


def assert_shown_well(page, name, both=True):
    """Nothing is cut off, every picture has its words, and axe-core finds nothing serious, in a
    window of 1280 pixels beside the file browser, in the light and in the dark theme, or
    (both=False) in the one that the page is in.

    The page stays in the second of them, and the next notebook begins in it: a change of themes
    draws all anew, for 2 CPU seconds. A screenshot takes as many: of the second theme there is one
    if it has a fault."""
    page_faults.unfold(page)
    first = page_faults.theme(page)
    second = "dark" if first == "light" else "light"
    try:
        page_faults.photograph(page, SCREENSHOTS, name, first)
        assert page_faults.faults(page) == [], first
        if not both:
            return
        page_faults.choose_theme(page, second)
        if found := page_faults.faults_of_colours(page):
            page_faults.photograph(page, SCREENSHOTS, name, second)
        assert found == [], second
    finally:
        page_faults.fold(page)


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.gate] * name.startswith("02_")) for name in NAMES])
def test_an_untouched_notebook_runs_and_is_shown_well(untouched, page, name):
    """One page is looked at in both themes: the other texts and pictures are those of the
    solutions, which are, and what waits looks the same everywhere."""
    notebook = untouched(name)
    assert_untouched(notebook.untouched)
    assert_shown_well(page, f"{name}-student", both=name.startswith("02_"))
    if name not in [typed for typed, *_ in TYPED]:
        notebook.close()


def test_an_untouched_launch_shows_every_rank(untouched):
    [launched] = [text_of(cell) for cell in untouched("00_start_here").untouched
                  if "launch(hello" in cell["source"] and cell["kind"] == "code"]
    assert "rank 1 │ I am one of" in launched and "[0, 10, 20, 30" in launched


@pytest.mark.parametrize(("name", "exercise", "check", "shown"), TYPED)
def test_a_right_answer_is_typed_and_accepted(untouched, name, exercise, check, shown):
    notebook = untouched(name)
    cell = notebook.find(exercise)
    notebook.type(cell, answer(name, exercise))
    notebook.run_cell(cell)
    verdict = notebook.run_cell(notebook.find(check))
    api.expect(verdict).to_contain_text(f"✓ {exercise[2:].split(':')[0]}")
    picture = notebook.run_cell(notebook.find(shown))
    api.expect(picture.locator("img")).to_be_visible()


@pytest.mark.gate
def test_the_stop_button_ends_a_launch_and_the_notebook_goes_on(untouched, lab):
    notebook = untouched("00_start_here")
    cell = notebook.find("launch(write_down")
    notebook.type(cell, ENDLESS)
    notebook.start_cell(cell)
    output = notebook.output(cell)
    api.expect(output).to_contain_text("rank 1 │ working")
    assert leaks.workers_below(lab.pid)
    notebook.press("notebook:interrupt-kernel")
    notebook.wait()
    api.expect(output).to_contain_text("interrupted; all ranks were stopped")
    assert leaks.until(lambda: not leaks.workers_below(lab.pid), 2)
    after = notebook.run_cell(notebook.find("launch(hello"))
    api.expect(after).to_contain_text("rank 1 │ I am one of")


@pytest.mark.parametrize("name", NAMES)
def test_a_solution_is_shown_well_as_it_was_saved(page, name):
    notebook = Notebook(page, f"solutions/{name}.ipynb")
    assert sum(bool(cell["outputs"]) for cell in notebook.cells()) > 20
    assert_shown_well(page, f"{name}-solution")
    notebook.close()


def test_the_slider_of_the_solution_moves_the_buckets(page):
    notebook = Notebook(page, "solutions/02_manual_ddp.ipynb")
    for text in ("import labs.manual_ddp as lab", "def make_buckets("):
        notebook.run_cell(notebook.find(text))
    output = notebook.run_cell(notebook.find("lab.explore_buckets("))
    picture, slider = output.locator("img"), output.get_by_role("slider", name="cap, MB")
    api.expect(output.locator(".widget-readout")).to_have_text("0.8")
    before, source = picture.screenshot(), picture.get_attribute("src")
    slider.press("ArrowRight")
    api.expect(output.locator(".widget-readout")).to_have_text("1.6")
    api.expect(picture).not_to_have_attribute("src", source)
    assert picture.screenshot() != before


def test_the_slider_of_the_ring_goes_through_its_steps(page):
    notebook = Notebook(page, "solutions/00_start_here.ipynb")
    notebook.run_cell(notebook.find("import labs.start_here as lab"))
    output = notebook.run_cell(notebook.find("lab.ring_steps(ring_reduce_scatter"))
    picture, slider = output.locator("img"), output.get_by_role("slider", name="step")
    api.expect(output.locator(".widget-readout")).to_have_text("1: add")
    for key, step, words in (("Home", "before", "Each rank holds its own numbers only"),
                             ("ArrowRight", "1: add", "Rank 0 sends piece 0 to rank 1"),
                             ("End", "3: add", "Rank 0 sends piece 2 to rank 1"),
                             ("ArrowLeft", "2: add", "Rank 0 sends piece 3 to rank 1")):
        slider.press(key)
        api.expect(output.locator(".widget-readout")).to_have_text(step)
        api.expect(picture).to_have_attribute("alt", re.compile(words))


def test_a_plans_memory_follows_its_sliders_and_menus(page, lab):
    write_notebook(lab.folder / "memory.ipynb", MEMORY)
    output = Notebook(page, "memory.ipynb").run_cell(0)
    chart, seen = output.get_by_role("img"), []

    def moves(control, act, *how):
        verdict = chart.get_attribute("aria-label")
        seen.append(chart.screenshot())
        getattr(control, act)(*how)
        api.expect(chart).not_to_have_attribute("aria-label", verdict)

    moves(output.get_by_role("slider", name="GPUs"), "press", "ArrowUp")
    api.expect(output.locator(".widget-readout").nth(0)).to_have_text("16")
    moves(output.get_by_role("combobox").nth(0), "select_option", "Llama-3-70B")
    moves(output.get_by_role("combobox").nth(1), "select_option", "DDP")
    assert len({*seen, chart.screenshot()}) == 4
    moves(output.get_by_role("combobox").nth(2), "select_option", "bf16 policy  (4 + 4 + 8 bytes)")
    api.expect(output).to_contain_text("No such job: recipe 'bf16 policy'")


def test_a_menu_takes_the_arrow_keys(page, lab):
    write_notebook(lab.folder / "menus.ipynb", MEMORY, more=["2 + 2"])
    output = Notebook(page, "menus.ipynb").run_cell(0)
    chart, menu = output.get_by_role("img"), output.get_by_role("combobox", name="strategy")
    verdict = chart.get_attribute("aria-label")
    menu.press("ArrowUp")
    api.expect(menu).to_have_value("ZeRO-2")
    api.expect(chart).not_to_have_attribute("aria-label", verdict)
    assert page.evaluate("window.jupyterapp.shell.currentWidget.content.activeCellIndex") == 0


def test_a_widget_without_its_kernel_says_what_to_do_and_keeps_its_picture(page, lab):
    """After a restart, and where the saved notebook is opened again."""
    write_notebook(lab.folder / "saved.ipynb", MEMORY)
    notebook = Notebook(page, "saved.ipynb")
    output = notebook.run_cell(0)
    output.get_by_role("combobox", name="strategy").select_option("DDP")
    api.expect(output.get_by_role("img")).to_have_attribute("aria-label", re.compile("none of"))
    assert run_again(output) == "none"
    notebook.save()  # what it holds of widgets is what is drawn by now
    page.evaluate(RESTART)
    assert_dead(output)
    notebook.close()
    reopened = Notebook(page, "saved.ipynb")
    assert_dead(reopened.output(0))
    output = reopened.run_cell(0)
    api.expect(output.get_by_role("slider").first).to_be_visible()
    assert run_again(output) == "none"


def assert_dead(output):
    """Neither controls nor broken links stand there, but what to do, and the last picture."""
    api.expect(output.locator(".labs-panel.jupyter-widgets-disconnected")).to_be_visible()
    assert "Run this cell again" in run_again(output)
    for control in ("slider", "combobox"):
        api.expect(output.get_by_role(control)).to_have_count(0)
    api.expect(output.get_by_role("img")).to_have_attribute("aria-label", re.compile("none of"))
    api.expect(output).not_to_contain_text("Error displaying widget")
    icons = output.locator(".labs-panel .jupyter-widgets-disconnected")
    assert set(icons.evaluate_all("all => all.map(each => "
                                  "getComputedStyle(each, '::before').content)")) == {"none"}


def run_again(output) -> str:
    return output.locator(".labs-panel").evaluate("panel => "
                                                  "getComputedStyle(panel, '::before').content")


def test_a_picture_has_its_words_and_follows_the_dark_theme(page, lab):
    write_notebook(lab.folder / "dark.ipynb", "import labs\n\nlabs.machine()")
    page_faults.choose_theme(page, "light")
    picture = Notebook(page, "dark.ipynb").run_cell(0).get_by_role("img", name="CPU core")
    api.expect(picture).to_be_visible()
    assert corner(picture.screenshot()) == (255, 255, 255)
    page_faults.choose_theme(page, "dark")
    # On a crowded machine the page is drawn anew some time after its theme is known to it.
    for _ in range(50):
        seen = corner(picture.screenshot())
        if max(seen) < 40:
            break
        page.wait_for_timeout(200)
    page_faults.choose_theme(page, "light")
    assert max(seen) < 40


def corner(png):
    """The colour of a screenshot's first pixel."""
    return Image.open(io.BytesIO(png)).convert("RGB").getpixel((2, 2))


# JupyterLab takes some HTML out of outputs that no cell has put there in this session, and gives
# pictures in it an alt text of its own.
FAULTS = {
    "<img src='data:image/png;base64,{png}'>": "a picture without words",
    "<img alt='{words}' width='2000' src='data:image/png;base64,{png}'>": "out of sight",
    "<pre style='width:2000px'>far</pre>": "wider than its place",
    "<img alt='{words}' src='data:image/png;base64,AAAA'>": "a picture that does not load",
    "<p>Error displaying widget: model not found</p>": "a widget that is not there",
    "<p style='color:#ddd;background:#fff'>hard to read</p>": "color-contrast",
    "<label>ranks</label><input type='range'>": "label",
}


def test_faults_of_a_notebook_are_found(page, lab):
    png = base64.b64encode(blank_png()).decode()
    outputs = [{"text/html": html.format(png=png, words="a picture of nothing at all")}
               for html in FAULTS] + [{"image/png": png}]
    write_notebook(lab.folder / "faults.ipynb", "1", *outputs)
    Notebook(page, "faults.ipynb")
    page_faults.unfold(page)
    found = page_faults.faults(page)
    page_faults.fold(page)
    assert [words for words in FAULTS.values() if words not in "\n".join(found)] == []
    assert "\n".join(found).count("a picture without words") == 2, found


def blank_png():
    file = io.BytesIO()
    Image.new("RGB", (9, 9)).save(file, "png")
    return file.getvalue()
