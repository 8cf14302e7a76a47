"""What a written record says, read back from its JSON."""

import json
from collections.abc import Sequence

from labs.exercises.verdicts import Verdict, shows
from labs.pictures.tables import Table
from labs.scaling.record.document import Record
from labs.scaling.record.session import TOPICS

TITLE = "The record, read back"


@shows(TITLE)
def show_record(record: Record) -> Table | Verdict:
    """Returns a table of how many numbers of each topic the record has, and which of them is
    furthest from its prediction."""
    if record.folder is None:
        return Verdict(TITLE, None, f"nothing was written: {record.problem}")
    data = json.loads((record.folder / "numbers.json").read_text(encoding="utf-8"))
    by_topic = {topic: [one for one in data["numbers"] if one["topic"] == topic]
                for topic in TOPICS}
    rows = [(TOPICS[topic], *_furthest(numbers)) for topic, numbers in by_topic.items()]
    versions = data["machine"]["versions"]
    return Table(f"{data['machine']['title']}, {data['date'].replace('T', ' ')}, torch "
                 f"{versions['torch']}", ("topic", "number furthest from its prediction", "error",
                                          "numbers", "with a prediction"), rows, left=1)


def _furthest(numbers: Sequence[dict]) -> tuple:
    """(which number is furthest from its prediction, by how much, how many numbers there are, how
    many of them were predicted)."""
    errors = {one["name"]: one["value"] / one["predicted"] - 1 for one in numbers
              if one["predicted"] and one["value"] is not None}
    worst = max(errors, key=lambda name: abs(errors[name]), default=None)
    error = "" if worst is None else f"{errors[worst]:+.1%}"
    return worst or "–", error, len(numbers), len(errors)
