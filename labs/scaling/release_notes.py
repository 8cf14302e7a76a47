"""The figure of a release note that exercise 6.3 reads as an efficiency."""

from dataclasses import dataclass

from labs.workers import variant


@dataclass(frozen=True)
class ReleaseNote:
    """What a note calls an efficiency and is a speed-up: lowest to highest times the throughput of
    one GPU, on so many GPUs."""

    gpus: int
    lowest: float
    highest: float

    def __repr__(self):
        return f"{self.lowest:g}–{self.highest:g}× scaling efficiency on {self.gpus} GPUs"


# All are above 1, and no efficiency is the same as another note's. The first one is the workbook's
# without a variant.
NOTES = (ReleaseNote(2, 1.5, 1.7), ReleaseNote(2, 1.3, 1.6), ReleaseNote(4, 2.5, 3.1),
         ReleaseNote(4, 2.9, 3.5), ReleaseNote(8, 5.4, 6.2), ReleaseNote(8, 4.6, 7.1))


def show_release_note() -> ReleaseNote:
    """The note of exercise 6.3; another one in a variant of the workbook."""
    return variant.choice(NOTES)
