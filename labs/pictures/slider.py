"""A slider over named options that has an accessible name (ipywidgets' own sliders have none), and
what it shares with the menu of `labs.pictures.menu`.

Needs Jupyter, unlike the rest of `labs`: only `labs.pictures.widgets` imports it, where it draws.
"""

import anywidget
import traitlets

from labs.pictures import palette

# The classes are those of ipywidgets, whose style sheet every front end with widgets has: name,
# slider and readout line up with a menu's, and follow the page's theme.
_ESM = """\
function render({ model, el }) {
  const make = (kind, more) => Object.assign(document.createElement(kind), more);
  const label = make("label"), name = make("span", { className: "widget-label" });
  const input = make("input", { type: "range", min: 0, step: 1 });
  // Screen readers speak the option as aria-valuetext of the slider; not a second time from here.
  const readout = make("span", { className: "widget-readout", ariaHidden: "true" });
  // JupyterLab would take the arrow keys, which it leaves to text fields only, to change the cell.
  input.dataset.lmSuppressShortcuts = "true";

  function show() {
    const options = model.get("options"), index = model.get("index");
    name.textContent = model.get("label");
    name.style.width = model.get("label_width");
    input.max = options.length - 1;
    input.value = index;
    input.ariaValueText = readout.textContent = options[index];
  }

  input.addEventListener("input", () => {
    model.set("index", input.valueAsNumber);
    model.save_changes();
  });
  model.on("change", show);
  label.append(name, input);
  el.classList.add("jupyter-widgets", "widget-inline-hbox", "labs-slider");
  el.append(label, readout);
  show();
  return () => model.off("change", show);
}

export default { render };
"""
_CSS = f"""\
.labs-slider label {{ display: flex; flex: 1 1 auto; align-items: center; min-width: 0; }}
.labs-slider input {{
  flex: 1 1 auto; min-width: 60px; margin: 0 4px; cursor: pointer;
  accent-color: var(--jp-brand-color1, {palette.MUTED});
}}
[data-jp-theme-light="false"] .labs-slider input, .vscode-dark .labs-slider input {{
  color-scheme: dark;
}}
"""


# Once the kernel is gone, after a restart and where a saved notebook is opened again, ipywidgets
# gives each view the class jupyter-widgets-disconnected, and a broken link for an icon.
PANEL_CSS = """\
.labs-panel .jupyter-widgets-disconnected::before { content: none !important; }
.labs-panel.jupyter-widgets-disconnected > .labs-controls { display: none !important; }
.labs-panel.jupyter-widgets-disconnected::before {
  content: "Run this cell again to choose: the kernel that answered its controls has ended.";
  color: var(--jp-ui-font-color1, black) !important;
  font: bold var(--jp-ui-font-size1, 13px) var(--jp-ui-font-family, sans-serif) !important;
  margin: 2px 8px 6px; white-space: normal;
}
"""


class Chooser(anywidget.AnyWidget):
    """One of `options`, (label, value) pairs. A subclass has the JavaScript that shows them.

    value: of the chosen option; setting it moves the control. Raises TraitError for any other.
    """

    label = traitlets.Unicode().tag(sync=True)
    label_width = traitlets.Unicode().tag(sync=True)  # a length of CSS, or "auto"
    options = traitlets.List(traitlets.Unicode()).tag(sync=True)  # their labels
    index = traitlets.Int().tag(sync=True)
    value = traitlets.Any()

    def __init__(self, label: str, options: list[tuple[str, object]], value: object,
                 label_width: str = "auto", **more):
        self._values = [each for _, each in options]
        super().__init__(label=label, label_width=label_width, value=value,
                         options=[name for name, _ in options], **more)

    @traitlets.validate("value")
    def _among_options(self, proposal):
        if proposal["value"] not in self._values:
            raise traitlets.TraitError(f"{self.label} has no option {proposal['value']!r}")
        return proposal["value"]

    @traitlets.observe("value")
    def _move(self, _):
        self.index = self._values.index(self.value)

    @traitlets.observe("index")
    def _choose(self, _):
        self.value = self._values[self.index]


class Slider(Chooser):
    """Options to be chosen by dragging or with the arrow keys."""

    _esm = _ESM
    _css = _CSS + PANEL_CSS
