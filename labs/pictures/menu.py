"""A drop-down menu that takes the arrow keys: in JupyterLab they change the cell where ipywidgets'
own menu has the focus. Needs Jupyter: only `labs.pictures.widgets` imports it, where it draws."""

from labs.pictures.slider import PANEL_CSS, Chooser

# The classes are those of ipywidgets' menu, whose style sheet draws it in the page's theme.
_ESM = """\
function render({ model, el }) {
  const make = (kind, more) => Object.assign(document.createElement(kind), more);
  const select = make("select", { id: `labs-menu-${crypto.getRandomValues(new Uint32Array(2))}` });
  const label = make("label", { className: "widget-label", htmlFor: select.id });
  // JupyterLab would take the arrow keys, which it leaves to text fields only, to change the cell.
  select.dataset.lmSuppressShortcuts = "true";

  function show() {
    label.textContent = model.get("label");
    label.style.width = model.get("label_width");
    select.replaceChildren(...model.get("options").map(text => make("option", { text })));
    select.selectedIndex = model.get("index");
  }

  select.addEventListener("change", () => {
    model.set("index", select.selectedIndex);
    model.save_changes();
  });
  model.on("change:index", () => { select.selectedIndex = model.get("index"); });
  el.classList.add("jupyter-widgets", "widget-inline-hbox", "widget-dropdown", "labs-menu");
  el.append(label, select);
  show();
}

export default { render };
"""


class Menu(Chooser):
    """Options to be chosen from a list, with the mouse or the arrow keys."""

    _esm = _ESM
    _css = PANEL_CSS
