"""How a model falls into buckets, for a cap that the student moves with a slider."""

from labs.exercises.verdicts import shows
from labs.pictures import buckets as pictures
from labs.pictures import widgets
from labs.training import models

CAPS = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 25.0)  # MB


@shows("2.5")
def explore_buckets(make_buckets, preset):
    """The preset's GPT-2 in buckets; without a live kernel, the picture for the preset's cap."""
    model = models.gpt2(preset.layers, preset.hidden, preset.heads, preset.context)
    names = {id(parameter): name.removeprefix("transformer.")
             for name, parameter in model.named_parameters()}

    def picture(cap_mb):
        cut = make_buckets(model.parameters(), cap_mb * 1e6)
        return pictures.blocks([[(names[id(p)], p.numel() * p.element_size()) for p in bucket]
                                for bucket in cut], cap_mb * 1e6)

    cap = preset.cap_bytes / 1e6
    return widgets.Slider("cap, MB", sorted({*CAPS, cap}), cap, picture)
