"""What is wrong with a notebook as JupyterLab shows it: cut off, without words, or hard to use for
somebody with a screen reader or weak eyes."""

from pathlib import Path

from browsing import SHOWN

# What the workbook itself puts on the page. The rest is JupyterLab's: its editor, prompts and bars.
OURS = [f"{SHOWN} .jp-RenderedMarkdown", f"{SHOWN} .jp-OutputArea-output"]
# Of a saved picture JupyterLab makes an <img> that nobody can give an alt text; its words are
# looked for by `WORDLESS` instead.
SAVED = f"{SHOWN} .jp-RenderedImage img"
# JupyterLab's body has no height of its own, and axe takes all that is in it for hidden: it would
# find no text of too little contrast.
AXE = """async ([ours, saved, rules]) => {
    document.body.style.height = '100vh';
    const chosen = { include: ours.map(each => [each]), exclude: [[saved]] };
    const options = { resultTypes: ['violations'], ...(rules && { runOnly: rules }) };
    const { violations } = await axe.run(chosen, options);
    return violations.filter(rule => ['serious', 'critical'].includes(rule.impact)).map(rule =>
        `${rule.id} (${rule.impact}): ${rule.help}: `
        + rule.nodes.slice(0, 3).map(node => node.html.slice(0, 200)).join(' ; '));
}"""
# Elements that are wider than their place, or stand out of it; broken pictures and widgets.
CUT_OFF = """([shown, ours]) => {
    const found = [];
    const blame = (element, what) => {
        const cell = element.closest('.jp-Cell'), words = element.innerText ?? element.alt ?? '';
        found.push(`cell ${cell?.dataset.windowedListIndex}: ${what}: ${words.slice(0, 80)}`);
    };
    const panel = document.querySelector(`${shown} .jp-WindowedPanel-outer`);
    const right = panel.getBoundingClientRect().right;
    for (const place of document.querySelectorAll(ours)) {
        if (place.scrollWidth > place.clientWidth + 1) blame(place, 'wider than its place');
        if (place.scrollHeight > place.clientHeight + 1) blame(place, 'higher than its place');
        for (const part of place.querySelectorAll('img, svg, table, pre, mjx-container')) {
            if (part.getBoundingClientRect().right > right + 1) blame(part, 'out of sight');
        }
    }
    for (const line of document.querySelectorAll(`${shown} .jp-CodeCell .cm-scroller`)) {
        if (line.scrollWidth > line.clientWidth + 1) blame(line, 'code that has to be scrolled');
    }
    for (const output of document.querySelectorAll(`${shown} .jp-OutputArea-output`)) {
        const lost = /not found|Error displaying widget/.test(output.innerText);
        if (lost) blame(output, 'a widget that is not there');
    }
    for (const image of document.querySelectorAll(`${shown} img`)) {
        if (!image.naturalWidth) blame(image, 'a picture that does not load');
    }
    return found;
}"""
# Pictures without a text that says what they show: an alt text, or the fold below a saved one.
WORDLESS = """([shown, least]) => {
    const found = [];
    const say = (picture, words) => {
        const cell = picture.closest('.jp-Cell').dataset.windowedListIndex;
        if ((words ?? '').trim().length >= least) return;
        found.push(`cell ${cell}: a picture without words`);
    };
    for (const image of document.querySelectorAll(`${shown} .jp-OutputArea-output img`)) {
        const saved = image.closest('.jp-RenderedImage');
        const next = saved?.closest('.jp-OutputArea-child')?.nextElementSibling;
        const fold = next?.querySelector('details');
        say(image, saved ? fold?.textContent : image.alt);
    }
    for (const drawn of document.querySelectorAll(`${shown} .jp-OutputArea-output svg[role=img]`)) {
        say(drawn, drawn.getAttribute('aria-label'));
    }
    return found;
}"""
COLOURS = ["color-contrast", "link-in-text-block"]  # axe's rules; it takes longest for all others
LEAST = 20  # characters of a text that says what a picture shows
# The last cell's lower edge in pixels, of a notebook that is scrolled to its beginning.
LOWER_EDGE = """shown => {
    document.querySelector(`${shown} .jp-WindowedPanel-outer`).scrollTop = 0;
    const cells = document.querySelectorAll(`${shown} .jp-Cell`);
    return [...cells].at(-1).getBoundingClientRect().bottom;
}"""
IMAGES = """shown => Promise.all([...document.querySelectorAll(`${shown} img`)].map(
    image => image.decode().catch(() => {}))).then(() => true)"""
THEME = "theme => window.jupyterapp.commands.execute('apputils:change-theme', { theme })"
THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}
WIDTH, USUAL, PART = 1280, 900, 8000  # pixels: a window, and the longest part of a screenshot


def unfold(page) -> None:
    """Makes the window as high as the shown notebook."""
    page.evaluate(IMAGES, SHOWN)
    for _ in range(5):
        edge = round(page.evaluate(LOWER_EDGE, SHOWN)) + 60
        if edge == page.viewport_size["height"]:
            return
        page.set_viewport_size({"width": WIDTH, "height": edge})
        page.wait_for_timeout(300)
    raise RuntimeError(f"the notebook is never drawn whole: {edge} pixels")


def fold(page) -> None:
    """Gives the window its usual height again."""
    page.set_viewport_size({"width": WIDTH, "height": USUAL})


def choose_theme(page, name: str) -> None:
    """Shows JupyterLab in the theme "light" or "dark"."""
    page.evaluate(THEME, THEMES[name])
    page.wait_for_function("light => document.body.dataset.jpThemeLight == light",
                           arg=str(name == "light").lower())


def theme(page) -> str:
    """The theme in which JupyterLab is shown: "light" or "dark"."""
    is_light = page.evaluate("document.body.dataset.jpThemeLight")
    return "light" if is_light == "true" else "dark"


def faults(page) -> list[str]:
    """A sentence for each thing that is wrong with the shown notebook, which is unfolded."""
    return (page.evaluate(CUT_OFF, [SHOWN, ", ".join(OURS)])
            + page.evaluate(WORDLESS, [SHOWN, LEAST]) + _violations(page))


def faults_of_colours(page) -> list[str]:
    """Those of `faults` that another theme can have."""
    return _violations(page, COLOURS)


def _violations(page, rules=None) -> list[str]:
    if not page.evaluate("typeof window.axe != 'undefined'"):
        page.evaluate(_axe())
    return page.evaluate(AXE, [OURS, SAVED, rules])


def _axe() -> str:
    import axe_playwright_python

    return (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text()


def photograph(page, folder: Path, name: str, theme: str) -> None:
    """Writes the unfolded notebook as folder/name-theme-1.jpg and so on, each of at most PART
    pixels, in place of those of this theme from an earlier run."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"{name}-{theme}-*.jpg"):
        old.unlink()
    height = page.viewport_size["height"]
    for number, top in enumerate(range(0, height, PART), 1):
        clip = {"x": 0, "y": top, "width": WIDTH, "height": min(PART, height - top)}
        page.screenshot(path=folder / f"{name}-{theme}-{number}.jpg",
                        type="jpeg", quality=60, clip=clip)
