"""A deadlock at the speed at which it happened: one rank has no batch left and returns, the others
wait for it, and `launch` finds out."""

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from _animate.film import with_lesson
from labs.pictures import outcomes, palette
from labs.pictures.outcomes import Lane
from labs.pictures.picture import Picture
from labs.workers import devices
from labs.workers.failures import RanksStuck
from labs.workers.launcher import launch
from labs.workers.source_lines import Place

TITLE = "A deadlock, explained within seconds: which rank is missing, and where the others wait"
BATCH, LATER = 0.7, 0.1  # seconds that a batch takes on rank 0, and more on each rank after it
HANG_AFTER = 1.0  # seconds of waiting before launch calls it a hang
TICK, END = 0.1, 3.6  # seconds: of a frame, and of the last one


def train(folder: str) -> None:
    """On a rank: r + 2 batches on rank r, and an all-reduce of the loss after each. Writes down
    when it does what."""
    rank = dist.get_rank()
    with open(f"{folder}/{rank}", "w", buffering=1) as file:
        def note(doing, number):
            # The clock is the machine's, so that the times of all ranks can be compared.
            file.write(json.dumps([time.monotonic(), doing, number]) + "\n")

        for number in range(1, rank + 3):
            note("computes batch", number)
            time.sleep(BATCH + LATER * rank)
            total = torch.ones((), device=devices.device())
            note("waits in all_reduce", number)
            dist.all_reduce(total)
        note("returned", rank + 2)


def record(ranks: int) -> dict:
    """events[rank]: (seconds, what it does from then on, number); what launch said, and when."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            launch(train, folder, ranks=ranks, quiet=True, hang_after=HANG_AFTER, device="cpu")
        except RanksStuck as error:
            raised, found = time.monotonic(), error
        events = [[json.loads(line) for line in (Path(folder) / f"{rank}").read_text().splitlines()]
                  for rank in range(ranks)]
    begin = min(of_rank[0][0] for of_rank in events)
    picture = outcomes.draw_failure(found)
    return {"events": [[[round(moment - begin, 3), doing, number]
                        for moment, doing, number in of_rank] for of_rank in events],
            "raised": round(raised - begin, 3), "message": str(found).splitlines(),
            "lanes": [_as_data(lane) for lane in picture.data]}


def frames(recorded: dict) -> Iterator[tuple[Picture, float]]:
    """(picture, seconds) of each frame; until launch raises, as fast as it was."""
    moment = 0.0
    while moment < recorded["raised"]:
        yield _running(recorded, moment), TICK
        moment += TICK
    yield still(recorded), END


def still(recorded: dict) -> Picture:
    """The last frame: what launch says."""
    lanes = [Lane(lane["rank"], lane["done"], lane["label"],
                  outcomes.WAITING if lane["waits"] else palette.MUTED,
                  lane["line"] and Place(__file__, lane["line"], train.__name__))
             for lane in recorded["lanes"]]
    lines = recorded["message"]
    picture = outcomes.draw_lanes("launch raised RanksStuck", outcomes.FAILED, lanes, lines, "",
                                  "\n".join(lines))
    return with_lesson(picture, TITLE, f"{recorded['raised']:.1f} s")


def alt(recorded: dict) -> str:
    """What the moving picture shows, for who does not see it."""
    return (f"{len(recorded['events'])} ranks all-reduce a loss after each batch, and rank r has "
            "r + 2 batches. Rank 0 returns after its last one, and the others wait in all_reduce. "
            f"After {recorded['raised']:.1f} seconds launch raises RanksStuck: "
            + "; ".join(recorded["message"]))


def _running(recorded, moment) -> Picture:
    lanes = [_lane(rank, events, moment) for rank, events in enumerate(recorded["events"])]
    picture = outcomes.draw_lanes("rank r has r + 2 batches, and an all-reduce after each",
                                  palette.MUTED, lanes, [], "", "the ranks run",
                                  room=len(recorded["message"]))
    return with_lesson(picture, TITLE, f"{moment:.1f} s")


def _lane(rank, events, moment) -> Lane:
    """What a rank does at a moment, which is what it wrote down last."""
    _, doing, number = [events[0], *(event for event in events[1:] if event[0] <= moment)][-1]
    if doing == "returned":
        return Lane(rank, number, doing, palette.MUTED)
    if doing.startswith("waits"):
        return Lane(rank, number - 1, f"{doing} (#{number})", outcomes.WAITING)
    return Lane(rank, number - 1, f"{doing} {number}", palette.INK)


def _as_data(lane) -> dict:
    return {"rank": lane.rank, "done": lane.done, "label": lane.label,
            "waits": lane.colour == outcomes.WAITING, "line": lane.place and lane.place.line}
