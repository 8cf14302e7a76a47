"""The short cut of a dry run: if all layers are alike, a few layers show what many need.

Between two marks (see replay) all moments shift by the same bytes when a layer is added, so each
segment's peak is a straight line in the number of layers, category by category. Traced are models
of 4 and 5 layers, and one of 6, which must come out as the other two say.
"""

from collections import Counter

from labs.predictions.dryrun import ddp

SIZES = (4, 5, 6)
_NUMBERS = ("layer_idx", "layer_index")  # attributes that hold a layer's own number
_EDGE = 2  # blocks at either end with a segment of their own


def alike(blocks) -> bool:
    """Whether all blocks have the same modules, settings and parameters."""
    return len({_signature(block) for block in blocks}) <= 1


def _signature(block) -> tuple:
    parts = [(name, type(module).__name__, _settings(module))
             for name, module in block.named_modules()]
    return tuple(parts), tuple((name, tuple(p.shape), p.dtype, p.requires_grad)
                               for name, p in block.named_parameters())


def _settings(module) -> tuple:
    return tuple((name, value) for name, value in sorted(vars(module).items())
                 if isinstance(value, (int, float, str)) and name not in _NUMBERS)


def extended(few: dict[int, list[tuple]], layers: int) -> list[tuple] | None:
    """Segments of a model of `layers` layers from those of SIZES, or None where they do not lie on
    a line. few: number of layers -> segments."""
    named = {size: _named(found, size) for size, found in few.items()}
    four, five, six = (named[size] for size in SIZES)
    if not set(four) <= set(five) <= set(six):
        return None
    line = {key: _line(four[key], five[key]) for key in four}
    # A straight line goes through any two points: the third one, 6 layers, is the test.
    predicted = {key: _at(line[key], 2) for key in line}
    if any(six[key][2:] != predicted[key] for key in line) or _higher(six, predicted):
        return None
    return [(*four[key][:2], *_at(line[key], layers - SIZES[0])) for key in line]


def _named(found, size) -> dict:
    """Segments by (phase, place, how often it was there before)."""
    times, named = Counter(), {}
    for segment in found:
        place = (segment[0], _place(segment[1], size))
        named[(*place, times[place])] = segment
        times[place] += 1
    return named


def _place(mark, size):
    what, index = mark
    if what != "block":
        return mark
    if index >= size - _EDGE:
        return ("from the end", size - 1 - index)
    return ("from the start", index)


def _line(four, five) -> list:
    """(bytes with 4 layers, bytes per further layer) by category, at the beginning and the peak."""
    return [[(a, b - a) for a, b in zip(four[i], five[i], strict=True)] for i in (2, 3)]


def _at(line, more) -> tuple:
    return tuple(tuple(base + more * slope for base, slope in moment) for moment in line)


def _higher(six, predicted) -> bool:
    """Whether a block in the middle reaches higher than those at the ends."""
    top = {}
    for (phase, *_), (_, peak) in predicted.items():
        top[phase] = max(top.get(phase, 0), sum(peak))
    return any(sum(segment[3]) > top[key[0]] for key, segment in six.items())


def collectives(few: dict[int, list], layers: int) -> Counter | None:
    """{(kind, bytes of one call): calls} for `layers` layers, or None if they are not on a line."""
    four, five, six = (Counter((c.kind, c.bytes) for c in few[size]) for size in SIZES)
    kinds = set(four) | set(five) | set(six)
    if any(six[k] - five[k] != five[k] - four[k] for k in kinds):
        return None
    counted = {k: four[k] + (layers - SIZES[0]) * (five[k] - four[k]) for k in kinds}
    return Counter({k: calls for k, calls in counted.items() if calls})


def bucket_calls(gradients: list[tuple], layers: int, cap: int) -> Counter:
    """DDP's all-reduces for `layers` layers, from the order of the gradients of 6."""
    middle = SIZES[-1] // 2
    here = [i for i, (block, _) in enumerate(gradients) if block == middle]
    pattern = [gradients[i][1] for i in here] * (layers - SIZES[-1])
    sizes = [size for _, size in gradients]
    return Counter(("all_reduce", size) for size in
                   ddp.bucket_sizes(sizes[:here[0]] + pattern + sizes[here[0]:], cap))
