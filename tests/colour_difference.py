"""How far apart two colours are for readers with normal sight and with the three kinds of colour
blindness; and which entries of a legend are too close."""

import functools
import math
from itertools import combinations

from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

LEAST = 15  # CIEDE2000; just noticeable is 1

# Machado, Oliveira and Fernandes, A Physiologically-based Model for Simulation of Color Vision
# Deficiency, IEEE TVCG 15(6), 2009, table 1, severity 1.0; for linear RGB.
SIGHT = {"normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
         "protan": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216),
                    (-0.003882, -0.048116, 1.051998)),
         "deutan": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413),
                    (-0.011820, 0.042940, 0.968881)),
         "tritan": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602),
                    (0.004733, 0.691367, 0.303900))}

_TO_XYZ = ((0.4124564, 0.3575761, 0.1804375), (0.2126729, 0.7151522, 0.0721750),
           (0.0193339, 0.1191920, 0.9503041))  # sRGB, IEC 61966-2-1
_WHITE = (0.95047, 1.0, 1.08883)  # D65
# CSS filter effects: hue-rotate(180deg).
_HUE_TURNED = ((-0.574, 1.43, 0.144), (0.426, 0.43, 0.144), (0.426, 1.43, -0.856))

Channels = tuple[float, float, float]


@functools.cache
def differences(one: Channels, other: Channels) -> dict[str, float]:
    """CIEDE2000 of two sRGB colours (0 to 1) by kind of sight."""
    return {sight: ciede2000(_lab(one, sight), _lab(other, sight)) for sight in SIGHT}


def smallest_difference(one: str, other: str) -> float:
    """The smallest of `differences` of two colours of matplotlib's."""
    return min(differences(to_rgba(one)[:3], to_rgba(other)[:3]).values())


def on_dark_page(colour: str) -> Channels:
    """What palette.DARK_FILTER makes of a colour: invert(0.93) and hue-rotate(180deg)."""
    return _clipped(_times(_HUE_TURNED, [0.93 - 0.86 * value for value in to_rgba(colour)[:3]]))


def _times(matrix, vector):
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


def _clipped(channels) -> Channels:
    return tuple(min(max(value, 0.0), 1.0) for value in channels)


def _lab(colour, sight):
    """CIELAB of an sRGB colour as somebody with this sight sees it."""
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
              for value in colour]
    seen = _clipped(_times(SIGHT[sight], linear))
    x, y, z = (_root(value / white) for value, white in zip(_times(_TO_XYZ, seen), _WHITE,
                                                             strict=True))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def _root(value):
    return value ** (1 / 3) if value > 216 / 24389 else (24389 / 27 * value + 16) / 116


def ciede2000(one: Channels, other: Channels) -> float:
    """The difference of two CIELAB colours: Sharma, Wu and Dalal, The CIEDE2000 Color-Difference
    Formula, Color Research and Application 30(1), 2005, equations 2 to 22."""
    (l1, a1, b1), (l2, a2, b2) = one, other
    mean_chroma = (math.hypot(a1, b1) + math.hypot(a2, b2)) / 2
    stretch = 1.5 - 0.5 * math.sqrt(mean_chroma**7 / (mean_chroma**7 + 25.0**7))
    c1, c2 = math.hypot(stretch * a1, b1), math.hypot(stretch * a2, b2)
    h1, h2 = (math.degrees(math.atan2(b, stretch * a)) % 360 for a, b in ((a1, b1), (a2, b2)))
    turn = (h2 - h1 + 180) % 360 - 180 if c1 * c2 else 0.0
    hue = 2 * math.sqrt(c1 * c2) * math.sin(math.radians(turn) / 2)
    light, chroma = (l1 + l2) / 2, (c1 + c2) / 2
    middle = h1 + h2 if not c1 * c2 else (h1 + h2) / 2
    if c1 * c2 and abs(h1 - h2) > 180:
        middle += 180 if h1 + h2 < 360 else -180
    t = (1 - 0.17 * _cos(middle - 30) + 0.24 * _cos(2 * middle) + 0.32 * _cos(3 * middle + 6)
         - 0.20 * _cos(4 * middle - 63))
    s_light = 1 + 0.015 * (light - 50) ** 2 / math.sqrt(20 + (light - 50) ** 2)
    s_chroma, s_hue = 1 + 0.045 * chroma, 1 + 0.015 * chroma * t
    r = (-2 * math.sqrt(chroma**7 / (chroma**7 + 25.0**7))
         * math.sin(math.radians(60 * math.exp(-(((middle - 275) / 25) ** 2)))))
    dl, dc, dh = (l2 - l1) / s_light, (c2 - c1) / s_chroma, hue / s_hue
    return math.sqrt(dl**2 + dc**2 + dh**2 + r * dc * dh)


def _cos(degrees):
    return math.cos(math.radians(degrees))


def entries_alike(figure: Figure) -> list[str]:
    """A sentence for each two entries of the figure's legends that differ by less than LEAST and
    have the same shape: hatching, marker, dashes and width."""
    legends = [*figure.legends, *(legend for ax in figure.axes if (legend := ax.get_legend()))]
    found = []
    for legend in legends:
        drawn = [(text.get_text(), *look) for text, handle in zip(
            legend.get_texts(), legend.legend_handles, strict=True)
            if (look := _look(handle)) is not None]
        found += [f"{name!r} and {other!r}: {most:.1f}"
                  for (name, shape, ones), (other, same, others) in combinations(drawn, 2)
                  if shape == same and (most := max(
                      min(differences(one, two).values())
                      for one, two in zip(ones, others, strict=True))) < LEAST]
    return found


def _look(handle):
    """(shape, colours on paper) of a legend's handle; None of what has no colour."""
    if isinstance(handle, Patch):
        if not handle.get_facecolor()[3] and not handle.get_edgecolor()[3]:
            return None
        # a hatch has the edge's colour, and tells as much as the ground
        hatch, edge = handle.get_hatch(), handle.get_edgecolor()
        fill, alpha = handle.get_facecolor(), handle.get_alpha()
        colours = [fill, edge] if hatch or edge[:3] != (1.0, 1.0, 1.0) else [fill]
        return (("patch", hatch, len(colours), handle.get_linestyle()),
                [_on_paper(colour, alpha) for colour in colours])
    if isinstance(handle, Line2D):
        shape = (handle.get_marker(), handle.get_linestyle(), str(handle._dash_pattern),
                 round(handle.get_linewidth()), handle.get_markerfacecolor() == "#ffffff")
        return shape, [_on_paper(to_rgba(handle.get_color()), handle.get_alpha())]
    return None


def _on_paper(colour, alpha) -> Channels:
    *channels, opacity = colour
    opacity = opacity if alpha is None else alpha
    return tuple(opacity * channel + 1 - opacity for channel in channels)
