"""A moving picture: frames, how long each is shown, and the files that they become."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageColor

from labs.pictures import palette
from labs.pictures.picture import WIDTH, Picture
from labs.pictures.sheet import write

LIMIT = 500_000  # bytes of a file: README loads three
LESSON = 0.42  # inches for the lesson above a picture
PIXELS = 1.5  # of the image per CSS pixel; more would be sharper, and over the limit
COLOURS = 96  # of all frames together: half the bytes, and nobody sees a difference


@dataclass(frozen=True)
class Frame:
    """An image, and the seconds for which it is shown."""

    image: Image.Image
    seconds: float


def frames_of(pictures: Iterable[tuple[Picture, float]]) -> list[Frame]:
    """The frames of (picture, seconds); what looks the same as the one before is one frame with
    it."""
    frames: list[Frame] = []
    for picture, seconds in pictures:
        image = picture.image(PIXELS)
        if frames and image.tobytes() == frames[-1].image.tobytes():
            frames[-1] = Frame(image, frames[-1].seconds + seconds)
        else:
            frames.append(Frame(image, seconds))
    return frames


def write_webp(path: Path, frames: list[Frame]) -> None:
    """Writes an animated WebP that repeats for ever, compressed without loss but in few colours."""
    images = [frame.image for frame in frames]
    colours = _common_colours([images[0], images[len(images) // 2], images[-1]])
    first, *rest = [_in_colours(image, colours) for image in images]
    first.save(path, save_all=True, append_images=rest, loop=0, lossless=True, quality=60, method=4,
               minimize_size=True, duration=[round(1e3 * frame.seconds) for frame in frames])


def _common_colours(images) -> Image.Image:
    """An image whose palette suits all of these. One palette for all frames: with one for each, a
    surface would change its colour a little from frame to frame, and flicker."""
    width, height = images[0].size
    strip = Image.new("RGB", (width, height * len(images)))
    for number, image in enumerate(images):
        strip.paste(image, (0, number * height))
    return strip.quantize(COLOURS, dither=Image.Dither.NONE)


def _in_colours(image, colours) -> Image.Image:
    """The image in these colours; but paper stays exactly what it is on the page."""
    found = np.array(image.quantize(palette=colours, dither=Image.Dither.NONE).convert("RGB"))
    paper = np.array(ImageColor.getrgb(palette.PAPER), dtype=found.dtype)
    found[(np.array(image) == paper).all(axis=-1)] = paper
    return Image.fromarray(found)


def write_still(path: Path, picture: Picture) -> None:
    """Writes one picture as a PNG, as notebooks have it."""
    path.write_bytes(picture.png())


def with_lesson(picture: Picture, lesson: str, right: str = "") -> Picture:
    """A picture that was drawn on a sheet, with its lesson above, and a few words on the right."""
    figure, [ax] = picture.figure, picture.figure.axes
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + LESSON)
    ax.set_ylim(height, -LESSON)
    write(ax, 0.1, 0.2 - LESSON, lesson, size=12, weight="bold")
    write(ax, WIDTH - 0.1, 0.23, right, ha="right")
    return Picture(figure, f"{lesson}\n{picture.text}", data=picture.data)
