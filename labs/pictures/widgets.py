"""Pictures that follow a slider where a kernel is live, and stand still where none is."""

from labs.pictures.picture import WIDTH, Picture


class Slider:
    """Draws `picture(value)` for the value of a slider over `values`. Where the front end cannot
    run widgets it is the picture for `value`."""

    def __init__(self, name: str, values: list, value, picture):
        self.name, self.values, self.value, self.picture = name, values, value, picture
        self.still: Picture = picture(value)

    def __repr__(self):
        return repr(self.still)

    def _repr_mimebundle_(self, include=None, exclude=None):
        data, metadata = self.still._repr_mimebundle_()
        box = self._box()
        if box is not None:
            data.update(box._repr_mimebundle_() or {})
            data["text/plain"] = repr(self.still)
        return data, metadata

    def _box(self):
        try:
            import ipywidgets
        except ImportError:
            return None
        slider = ipywidgets.SelectionSlider(
            options=[(f"{value:g}", value) for value in self.values], value=self.value,
            description=self.name, continuous_update=True,
            style={"description_width": "initial"},
            layout=ipywidgets.Layout(width="420px", margin="4px 2px 4px 10px"))
        image = ipywidgets.Image(value=self.still.png(), format="png",
                                 layout=ipywidgets.Layout(
                                     width=f"{round(96 * WIDTH)}px", height="auto"))

        def redraw(change):
            image.value = self.picture(change["new"]).png()

        slider.observe(redraw, names="value")
        return ipywidgets.VBox([slider, image])
