"""Exercise 8.8: the printed percentage of a table of interruptions that its counts contradict."""

from collections.abc import Callable, Sequence

from labs.checks.generator import new_generator
from labs.checks.numbers import Cause, judge_number, require_several, require_signature
from labs.checks.verdicts import Wrong, check, kind_of, shows
from labs.pictures.tables import Table
from labs.predictions.failures.reports import (
    LLAMA_3,
    LLAMA_3_ON_GPUS,
    LLAMA_3_TOTAL,
    InterruptionCause,
)

NAMES = ("the cause", "its percentage", "its count")
_ROUNDED = 0.0501  # percent: one decimal, and what float64 adds
_HINT = "A percentage of one decimal is 100 · count / total, rounded."


@check("8.8")
def check_misprint(misprint: Callable):
    """misprint(causes, total) -> (name, percentage, count): of the row whose printed percentage is
    not that of its count: the percentage that its count gives, with one decimal, and the count
    that its printed percentage gives."""
    require_signature(misprint, ("causes", "total"))
    for what, causes, total in [("Llama 3's table", LLAMA_3, LLAMA_3_TOTAL), *random_cases()]:
        judge_answer(misprint(causes, total), what, causes, total)
    return ("Llama 3's table and 12 others: the row, what its percentage would be, and what its "
            "count would be")


def wrong_row(causes, total) -> InterruptionCause:
    """The row that is off by more than rounding."""
    return max(causes, key=lambda cause: abs(100 * cause.count / total - cause.percent))


def random_cases():
    """Tables of other runs in which any row may be the wrong one, the first and the last too, in
    both directions; in some the counts are not all: `total` is larger than their sum."""
    rng = new_generator()
    for number in range(12):
        counts = [rng.randrange(3, 200) for _ in range(rng.randrange(3, 12))]
        total = sum(counts) + (rng.randrange(5, 90) if number % 3 == 0 else 0)
        at = (0, len(counts) - 1, rng.randrange(len(counts)))[number % 3]
        printed = [round(100 * count / total, 1) for count in counts]
        other = counts[at] + rng.choice((-1, 1)) * rng.randrange(2, 3 + counts[at] // 2)
        printed[at] = round(100 * max(0, other) / total, 1)
        if number % 4 == 1:  # the smallest misprint, in the last digit
            printed[at] = _next_decimal(100 * counts[at] / total)
        elif printed[at] == round(100 * counts[at] / total, 1):
            printed[at] = round(printed[at] + 1.5, 1)
        wrong = [place for place, (count, percent) in enumerate(zip(counts, printed, strict=True))
                 if round(100 * count / total, 1) != percent]
        assert wrong == [at], f"a table with the misprints {wrong}, not {at} alone"
        yield (f"a table of {len(counts)} causes, {total} interruptions", tuple(
            InterruptionCause(f"cause {chr(65 + place)}", count, percent)
            for place, (count, percent) in enumerate(zip(counts, printed, strict=True))), total)


def _next_decimal(percent) -> float:
    """The nearest percentage of one decimal that is further off than rounding explains."""
    others = (round(percent, 1) - 0.1, round(percent, 1) + 0.1)
    return round(min(others, key=lambda each: (abs(each - percent) < 0.06, abs(each - percent))), 1)


def judge_answer(returned: object, what: str, causes: Sequence[InterruptionCause],
                 total: int) -> tuple[str, float]:
    """Returns the cause's name and its other count. Raises Wrong for an answer that is wrong."""
    name, percent, count = require_several(returned, NAMES, f"{what}: misprint returned", "values")
    name = getattr(name, "name", name)
    if not isinstance(name, str):
        raise Wrong(f"{what}: the cause is {kind_of(name)}, not a name", "Return cause.name.",
                    code="wrong_type")
    row, rows = wrong_row(causes, total), {cause.name: cause for cause in causes}
    if name not in rows:
        raise Wrong(f"{what}: no cause has the name {name!r}", code="unknown_name")
    if name != row.name:
        other = rows[name]
        raise Wrong(f"{what}: {name} has {other.count} of {total} interruptions, "
                    f"{100 * other.count / total:.1f} %, and {other.percent} % is printed: that is "
                    "right", "Compare to one decimal: each percentage is rounded.",
                    code="wrong_row")
    said = f"{what}, {name}: {row.count} of {total}, printed {row.percent} %"
    right = 100 * row.count / total
    judge_number(percent, right, [
        Cause("printed", row.percent, "that is what is printed", "What does the count give?"),
        Cause("fraction", right / 100, "that is a fraction", "Per hundred."),
        Cause("sum_counts", 100 * row.count / sum(each.count for each in causes),
              "that is of the sum of the counts", "`total` is the number of all interruptions, "
              "also of those that the table leaves out.")],
        f"{said}; the percentage of its count", hint=_HINT, rel_tol=0, abs_tol=_ROUNDED)
    judge_number(count, row.percent * total / 100, [
        Cause("count_printed", row.count, "that is the count that is printed",
              "Which count has the printed percentage?"),
        Cause("other_causes_alone", row.percent / 100 * (total - row.count),
              "that is of the other causes alone", _HINT)],
        f"{said}; the count of its percentage", hint="Printed percentage · total / 100.",
        # The printed percentage is rounded to 0.05, which is 0.0005 of the total, and an answer may
        # be a whole number.
        rel_tol=0, abs_tol=0.0005 * total + 0.501)
    return name, float(count)


@shows("8.8")
def show_interruptions() -> Table:
    """The table of Llama 3's report: how often each cause interrupted its training."""
    rows = [(cause.name, str(cause.count), f"{cause.percent} %") for cause in LLAMA_3]
    return Table(f"Llama 3: {LLAMA_3_TOTAL} unexpected interruptions, as printed",
                 ("cause", "count", "percentage"), rows)


@shows("8.8")
def show_readings(misprint: Callable) -> Table:
    """What follows from either of the two numbers that contradict each other in Llama 3's table: by
    the student's function, and beside what else the report prints."""
    name, count = judge_answer(misprint(LLAMA_3, LLAMA_3_TOTAL), "Llama 3's table", LLAMA_3,
                               LLAMA_3_TOTAL)
    [row] = [cause for cause in LLAMA_3 if cause.name == name]
    others = sum(cause.count for cause in LLAMA_3 if cause.name != name)
    on_gpus = sum(cause.count for cause in LLAMA_3 if cause.is_gpu and cause.name != name)
    rows = [(what, f"{others + counted:.1f}", f"{100 * (on_gpus + counted) / LLAMA_3_TOTAL:.1f} %")
            for what, counted in ((f"the count, {row.count}", row.count),
                                  (f"the percentage, {row.percent} %", count))]
    return Table(f"{name}: two readings", ("right is", "sum of all counts", "GPUs and memory"),
                 [*rows, ("printed elsewhere", str(LLAMA_3_TOTAL), f"{LLAMA_3_ON_GPUS} %")])
