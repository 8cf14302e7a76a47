"""Makes animations: launches, draws, writes."""

import importlib
import sys
from pathlib import Path

from _bench.progress import done, say

from _animate import NotShown, catalogue, film


def make(names: list[str], folder: Path, ranks: int, redraw: bool) -> int:
    """Writes these animations into a folder; the exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        animation = importlib.import_module(f"_animate.{name}")
        if redraw:
            recorded = catalogue.read_recorded(folder).get(name)
            if recorded is None:
                print(f"{folder / catalogue.RECORDED} has no run of {name}: leave --redraw out.",
                      file=sys.stderr)
                return 1
        else:
            say(f"{name}: ranks run")
            try:
                recorded = animation.record(ranks)
            except NotShown as error:
                done()
                print(error, file=sys.stderr)
                return 1
            catalogue.keep_recorded(folder, name, recorded)
        _draw(name, animation, recorded, folder)
    return 0


def _draw(name, animation, recorded, folder):
    frames = film.frames_of(_told(name, animation.frames(recorded)))
    still = animation.still(recorded)
    moving, standing = folder / f"{name}.webp", folder / f"{name}.png"
    say(f"{name}: {len(frames)} frames are compressed")
    film.write_webp(moving, frames)
    film.write_still(standing, still)
    catalogue.add(folder, name, file=moving.name, still=standing.name, title=animation.TITLE,
                  alt=animation.alt(recorded),
                  size=[round(96 * inches) for inches in still.figure.get_size_inches()])
    done()
    seconds = sum(frame.seconds for frame in frames)
    print(f"{moving}: {moving.stat().st_size / 1e3:.0f} kB, {len(frames)} frames, {seconds:.1f} s; "
          f"{standing.name}: {standing.stat().st_size / 1e3:.0f} kB")
    if moving.stat().st_size > film.LIMIT:
        print(f"{moving} is over the {film.LIMIT / 1e3:.0f} kB that a page is given.",
              file=sys.stderr)


def _told(name, pictures):
    for number, picture in enumerate(pictures, 1):
        if number % 10 == 1:
            say(f"{name}: frame {number} is drawn")
        yield picture
