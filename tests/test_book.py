"""The web book: it says what the notebooks say, shows no answer unasked, and leads nowhere dead."""

import json
import re
from pathlib import Path

import pytest
from _book import command, glossary, links, mathml, pages, repository_links
from _build import build, student
from browsing import CHROMIUM, FLAGS, ROOT

INDEX = pages.page_of("book/index.md")
NOTEBOOK = pages.page_of("notebooks/02_manual_ddp.ipynb")
ADDRESS = "https://github.com/somebody/workbook"
AXE = """axe.run({exclude: [['.highlight']]}, {resultTypes: ['violations']}).then(
    found => found.violations.filter(one => ['serious', 'critical'].includes(one.impact)).map(
        one => `${one.id}: ${one.nodes[0].html.slice(0, 200)}`))"""
NO_COLOURS = "{rules: {'color-contrast': {enabled: false}}, resultTypes"
# Its rule on contrast takes minutes for pages of code, so code is looked at on a short page.
AXE_OF_CODE = """axe.run('.highlight', {runOnly: ['color-contrast']}).then(
    found => found.violations.map(one => one.nodes[0].html.slice(0, 200)))"""


@pytest.mark.parametrize(("text", "becomes"), [
    ("[next](03_zero_stages.ipynb)", "[next](03_zero_stages.html)"),
    ("[glossary](../GLOSSARY.md#terms)", "[glossary](../glossary.html#terms)"),
    ("[paper](https://a.b/c)", "[paper](https://a.b/c)"),
    ("see [code](../labs/words.py) there", "see code there"),
    ("`[next](03_zero_stages.ipynb)`", "`[next](03_zero_stages.ipynb)`"),
    ("```\n[next](03_zero_stages.ipynb)\n```\n", "```\n[next](03_zero_stages.ipynb)\n```\n"),
    ("[`zero` and\nmore](03_zero_stages.ipynb)", "[`zero` and\nmore](03_zero_stages.html)")])
def test_a_link_to_a_file_leads_to_its_page(text, becomes):
    assert repository_links.rewrite(text, NOTEBOOK, None) == becomes


def test_a_link_to_what_is_no_page_leads_to_the_repository_if_its_address_is_known():
    found = repository_links.rewrite("[words](../labs/words.py#L3)", INDEX, ADDRESS)
    assert found == f"[words]({ADDRESS}/blob/main/labs/words.py#L3)"


def test_a_link_to_no_file_is_one_sentence():
    with pytest.raises(repository_links.DeadLink, match="index.md links to ../lost.md, which"):
        repository_links.rewrite("[lost](../lost.md)", INDEX, None)


@pytest.mark.parametrize(("text", "entry"), [
    ("the **all-gather** that", "term-all-gather"), ("**Ranks** are", "term-rank"),
    ("**Ψ** and", "term-Ψ"), ("**process\ngroup**", "term-process-group")])
def test_a_term_links_to_its_entry(text, entry):
    assert f"](../glossary.html#{entry})" in glossary.link_terms(text, "../glossary.html")
    assert f'<span id="{entry}">' in glossary.with_anchors((ROOT / "GLOSSARY.md").read_text())


@pytest.mark.parametrize("text", ["**Notice:** this", "[**rank**](x.html)", "plain rank"])
def test_what_is_no_term_stays(text):
    assert glossary.link_terms(text, "glossary.html") == text


def test_formulas_become_mathml_and_prices_stay():
    pytest.importorskip("latex2mathml")
    assert mathml.render("a shard $B_i$ of it").startswith('a shard <math xmlns="http://www.w3.org')
    assert 'display="block"' in mathml.render(r"$$\frac{a}{b}$$")
    assert mathml.render("costs $22.32 an hour, not $2") == "costs $22.32 an hour, not $2"


def test_every_page_has_a_source_and_an_address_of_its_own():
    assert all((ROOT / page.source).is_file() for page in pages.PAGES)
    assert len({page.address for page in pages.PAGES}) == len(pages.PAGES)
    listed = [address for chapter in pages.contents().values() for address in chapter]
    assert [f"notebooks/{name}" for name in pages.NOTEBOOKS] == listed[3:3 + len(pages.NOTEBOOKS)]
    assert not any(address.startswith("answers/") for address in listed)


def test_another_folder_is_not_overwritten(tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(SystemExit):
        command.check(["--out", str(tmp_path)])
    assert "holds something else than a book" in capsys.readouterr().err


def test_dead_links_and_other_hosts_are_found(tmp_path):
    (tmp_path / "a.html").write_text("<p id='here'><a href='#here'></a><a href='b.html'></a>"
                                     "<a href='#there'></a><a href='https://a.b/c'></a>"
                                     "<script src='https://cdn.c/x.js'></script>")
    assert links.dead(tmp_path) == [
        "a.html: links to b.html, which is not there.",
        "a.html: links to #there, and a.html has no such place.",
        "a.html: fetches https://cdn.c/x.js from another host."]
    assert links.external(tmp_path) == {"https://a.b/c": "a.html"}


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The whole book, built once, as a repository that knows its address."""
    pytest.importorskip("myst_nb", reason="Sphinx is not installed: WORKBOOK_THIRD_PARTY=0")
    from _book import site as book

    out = tmp_path_factory.mktemp("book") / "site"
    book.build(out, ADDRESS, lambda step: None)
    return out


@pytest.mark.gate
@pytest.mark.slow
def test_the_book_leads_nowhere_dead_and_needs_no_other_host(site):
    assert links.dead(site) == []
    assert len(links.external(site)) > 40
    built, size = links.size(site)
    assert built >= len(pages.PAGES) and size < 20e6


@pytest.mark.gate
@pytest.mark.slow
@pytest.mark.parametrize("name", pages.NOTEBOOKS)
def test_a_notebook_has_a_page_without_answers_and_one_with_them(site, name):
    plain, answers = ((site / folder / f"{name}.html").read_text(encoding="utf-8")
                      for folder in ("notebooks", "answers"))
    secrets = student.secrets(build.read_lesson(ROOT, name).cells)
    shown = [line for _, line in secrets.values() if len(line) > 30]
    words = {page: student.tokens(_words(text)) for page, text in (("plain", plain),
                                                                   ("answers", answers))}
    kept = [line for line in shown if f" {student.tokens(line).strip()} " in words["answers"]]
    assert len(kept) > 0.8 * len(shown)
    assert not [line for line in kept if f" {student.tokens(line).strip()} " in words["plain"]]
    assert f'href="../answers/{name}.html"' in plain and f'href="{name}.ipynb"' in plain
    assert f"colab.research.google.com/github/somebody/workbook/blob/main/notebooks/{name}" in plain
    assert "opened alone" not in plain and not re.search("<b [^>]*>Your guess:", plain)


@pytest.mark.gate
@pytest.mark.slow
@pytest.mark.parametrize("name", pages.NOTEBOOKS)
def test_every_picture_has_its_words(site, name):
    text = (site / "notebooks" / f"{name}.html").read_text(encoding="utf-8")
    images = re.findall(r"<img [^>]*class='drawn'[^>]*>", text)
    notebook = json.loads((ROOT / "solutions" / f"{name}.ipynb").read_text(encoding="utf-8"))
    drawn = [output for cell in notebook["cells"] for output in cell.get("outputs", [])
             if "image/png" in output.get("data", {})]
    assert len(images) == len(drawn) and (images or name == "07d_sharded_muon")
    for image in images:
        assert len(re.search(r" alt='([^']*)'", image)[1]) > 20
        assert (site / "notebooks" / re.search(r" src='([^']*)'", image)[1]).is_file()


@pytest.mark.gate
@pytest.mark.slow
def test_a_search_finds_terms_and_no_answers(site):
    index = json.loads((site / "searchindex.js").read_text(encoding="utf-8")
                       .removeprefix("Search.setIndex(").removesuffix(")"))
    found = {index["docnames"][number] for words in (index["terms"], index["titleterms"])
             for numbers in words.values()
             for number in (numbers if isinstance(numbers, list) else [numbers])}
    assert {"glossary", *(f"notebooks/{name}" for name in pages.NOTEBOOKS)} <= found
    assert not [name for name in found if name.startswith("answers/")]


def _words(page: str) -> str:
    """The text of a page."""
    import html

    return html.unescape(re.sub(r"<[^>]+>", "", page))


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not CHROMIUM.exists():
        pytest.skip(f"there is no {CHROMIUM}: install the system's chromium")
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        yield started
        started.close()


@pytest.fixture
def opened(site, browser):
    """opened(address, scheme, width): the page of the site, from its file, with axe-core in it."""
    import axe_playwright_python

    axe = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text()
    contexts = []

    def opened(address: str, scheme: str = "light", width: int = 1280):
        contexts.append(browser.new_context(viewport={"width": width, "height": 900},
                                            color_scheme=scheme))
        page = contexts[-1].new_page()
        page.goto(f"file://{site}/{address}.html")
        # The theme's colours fade in: before that, axe measures what nobody reads.
        page.wait_for_function("document.getAnimations().every(one => one.playState !== 'running')")
        page.evaluate(axe)
        return page

    yield opened
    for context in contexts:
        context.close()


@pytest.mark.browser
@pytest.mark.gate
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("address", ["index", "setup", "notebooks/07c_sharding_in_jax"])
def test_axe_finds_nothing_serious(opened, address, scheme):
    page = opened(address, scheme)
    assert page.evaluate(AXE) == []
    if address == "setup":
        assert page.evaluate(AXE_OF_CODE) == []


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.parametrize("page", [page.address for page in pages.PAGES])
def test_axe_finds_nothing_serious_but_colours_on_any_page(opened, page):
    """Colours are the same on all pages, and take a minute for each."""
    assert opened(page).evaluate(AXE.replace("{resultTypes", NO_COLOURS)) == []


@pytest.mark.browser
@pytest.mark.gate
@pytest.mark.parametrize("address", ["index", "notebooks/02_manual_ddp", "glossary"])
def test_a_page_is_as_wide_as_a_phone(opened, address):
    page = opened(address, width=390)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
