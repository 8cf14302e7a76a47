"""How long labs.plan(only="memory") takes to redraw when a control moves, and what a picture
would."""

import statistics
import time

import labs
from _bench.progress import done, say
from labs.pictures import plan_memory


def _milliseconds(draw, rounds) -> dict:
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        draw()
        taken.append((time.perf_counter() - began) * 1e3)
    return {"median": statistics.median(taken), "worst": max(taken)}


def _walk(grid, name, choices):
    """A function that moves every slider to its end and back, one stop at each call."""
    moves = []
    for choice, handle in zip(choices, grid.children, strict=True):
        if choice.kind == "slider":
            stops = [value for _, value in choice.options]
            moves += [(handle, stop) for stop in [*stops, *reversed(stops), choice.value]]
    grid.children[0].value = name
    turn = iter(moves)

    def move():
        handle, stop = next(turn)
        while handle.value == stop:  # nothing would be redrawn
            handle, stop = next(turn)
        handle.value = stop

    return move, len(moves) - 10


def _record(choices, **setting) -> float:
    """Seconds that a model's first predictions take: for one sequence and for several, which run
    other operations; and as long as the slider allows, past the window of Mistral's attention."""
    longest = next(max(value for _, value in choice.options) for choice in choices
                   if choice.name == "sequence")
    began = time.perf_counter()
    for batch in (1, 2):
        for sequence in (setting["sequence"], longest):
            plan_memory.memory_live(**{**setting, "micro_batch": batch, "sequence": sequence})
    return time.perf_counter() - began


def run(arguments) -> dict:
    """Milliseconds from a slider's move to the new drawing, for each model; and of a PNG. What the
    sliders need recorded is recorded before, once per process; its seconds are given too."""
    moved, recorded = {}, {}
    controls = labs.plan(only="memory", sequence=1024)  # as long as GPT-2 allows
    for name in plan_memory.MODELS:
        say(f"{name}: sliders move")
        recorded[name] = _record(controls.choices, **{**controls.first, "model": name})
        grid, _ = controls.box().children
        move, moves = _walk(grid, name, controls.choices)
        moved[name] = _milliseconds(move, min(arguments.rounds or moves, moves))
    say("the same as a PNG")
    picture = _milliseconds(lambda: plan_memory.draw_memory(**controls.first).png(),
                            arguments.rounds or 5)
    done()
    return {"redraw_ms": moved, "recording_s": recorded, "png_ms": picture}


def table(result) -> str:
    """The result for a terminal."""
    lines = ['labs.plan(only="memory"): milliseconds from a move of a slider to its drawing',
             f"{'model':>12} {'median':>8} {'worst':>8}   {'recorded before':>15}"]
    seconds = result["recording_s"]
    lines += [f"{name:>12} {taken['median']:>8.1f} {taken['worst']:>8.1f}"
              + (f"   {seconds[name]:>13.2f} s" if name in seconds else "")
              for name, taken in {**result["redraw_ms"], "as a PNG": result["png_ms"]}.items()]
    return "\n".join(lines)
