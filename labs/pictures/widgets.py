"""Pictures with controls: redrawn at each choice where a kernel runs, still where none does."""

from collections.abc import Callable
from dataclasses import dataclass

from labs.pictures.picture import WIDTH, Picture

_PIXELS = f"{round(96 * WIDTH)}px"


@dataclass(frozen=True)
class Choice:
    """One control. name: the keyword that the drawing takes. options: (label, value) pairs; value:
    the first choice. kind: "slider" or "menu"."""

    name: str
    label: str
    options: list[tuple[str, object]]
    value: object
    kind: str = "slider"


def choices(kind_of: str, controls: list[tuple], first: dict[str, object],
            **defaults) -> list[Choice]:
    """A Choice for each (name, label, kind, options), with `first` or the default as its value.
    kind_of: the function that a wrong keyword was given to. options: values or (label, value)
    pairs; a positive integer between a slider's stops becomes a stop. Raises TypeError for an
    unknown name, ValueError for an unknown option."""
    names = [name for name, *_ in controls]
    if unknown := [name for name in first if name not in names]:
        raise TypeError(f"{kind_of} has no {unknown[0]!r}; it has {', '.join(names)}")
    return [_choice(*control, {**defaults, **first}[control[0]]) for control in controls]


def _choice(name, label, kind, options, value) -> Choice:
    pairs = [each if isinstance(each, tuple) else (
        f"{each:,}" if isinstance(each, int) else str(each), each) for each in options]
    if value not in [each for _, each in pairs]:
        if kind != "slider" or type(value) is not int or value < 1:
            raise ValueError(f"{name}={value!r}: choose {', '.join(repr(v) for _, v in pairs)}")
        pairs = sorted([*pairs, (f"{value:,}", value)], key=lambda pair: pair[1])
    return Choice(name, label, pairs, value, kind)


def powers_of_two(first: int, last: int) -> list[int]:
    """2^first to 2^last: the stops of a slider."""
    return [2**power for power in range(first, last + 1)]


class Controls:
    """Draws `picture(**chosen)` for the values of the controls; where the front end cannot run
    widgets, the `still` picture, or without one, that for the first choice of each.

    live: the same as HTML, where a picture takes too long to draw; columns: of the controls.
    """

    def __init__(self, choices: list[Choice], picture: Callable[..., Picture],
                 live: Callable[..., str] | None = None, columns: int = 1,
                 still: Picture | None = None):
        self.choices, self.picture, self.live, self.columns = choices, picture, live, columns
        self.first = {choice.name: choice.value for choice in choices}
        self.still: Picture = still or picture(**self.first)
        self._still_is_first = still is None

    @property
    def data(self) -> object:
        """The numbers that the still picture draws."""
        return self.still.data

    def __repr__(self):
        return repr(self.still)

    def _repr_mimebundle_(self, include=None, exclude=None):
        # A saved notebook has both: the widget where a kernel runs, and the still picture where
        # none does.
        data, metadata = self.still._repr_mimebundle_()
        box = self.box()
        if box is not None:
            data.update(box._repr_mimebundle_() or {})
            data["text/plain"] = repr(self.still)
        return data, metadata

    def box(self):
        """The controls and the view below them as a widget; None where ipywidgets or
        anywidget is missing."""
        try:
            import ipywidgets

            from labs.pictures.menu import Menu
            from labs.pictures.slider import Slider
        except ImportError:
            return None
        kinds = {"slider": Slider, "menu": Menu}
        handles = [_handle(ipywidgets, kinds[choice.kind], choice, self.columns > 1)
                   for choice in self.choices]
        drawn = self._still_is_first and not self.live  # not a second time
        view = ipywidgets.HTML(self.still.html() if drawn else self._html(**self.first),
                               layout=ipywidgets.Layout(max_width=_PIXELS, margin="0"))

        def redraw(_):
            view.value = self._html(**{choice.name: handle.value for choice, handle in
                                       zip(self.choices, handles, strict=True)})

        for handle in handles:
            handle.observe(redraw, names="value")
        least = round(0.8 * 96 * WIDTH / self.columns)  # pixels; on a narrow page columns wrap
        grid = ipywidgets.GridBox(handles, layout=ipywidgets.Layout(
            grid_template_columns=f"repeat(auto-fit, minmax(min({least}px, 100%), 1fr))",
            grid_gap="2px 18px", max_width=_PIXELS, margin="2px 2px 6px 8px"))
        # By these classes PANEL_CSS of labs.pictures.slider takes away controls that are dead.
        return ipywidgets.VBox([grid.add_class("labs-controls"), view]).add_class("labs-panel")

    def _html(self, **chosen) -> str:
        return self.live(**chosen) if self.live else self.picture(**chosen).html()


def _handle(ipywidgets, kind, choice, in_grid):
    layout = ipywidgets.Layout(width="auto" if in_grid else "420px", margin="2px")
    return kind(choice.label, choice.options, choice.value, layout=layout,
                label_width="104px" if in_grid else "auto")
