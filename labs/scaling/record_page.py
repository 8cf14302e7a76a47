"""The pages of a record, as Markdown: the README, and notes on the papers of ZeRO and FSDP with
questions, where the answer stands, the student's own numbers, and blank lines."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from labs.checks.records import Result
from labs.checks.verdicts import SIGNS
from labs.scaling import record_session
from labs.scaling.record_session import NEEDED, TOPICS, Row, Session


def page(session: Session, found: dict, when: str, files: dict[str, str]) -> str:
    """The page as Markdown. found: the machine's facts. files: of each picture its path by the
    name of its function, and of each trace its path by itself."""
    parts = [_top(found, when, session), *(_numbers(topic, session) for topic in TOPICS),
             _guesses(session), _exercises(session), _pictures(session.pictures, files),
             _texts(session.texts), _traces([path for path in files.values()
                                             if path.startswith("traces/")])]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def _top(found, when, session) -> list[str]:
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    on_cpu = [] if found["gpus"] else [
        "", "Measured on a CPU: bytes and calls are what they would be on GPUs, seconds are not."]
    missing = ["", f"**Missing**: {', '.join(TOPICS[topic].lower() for topic in session.missing)}. "
               "Nothing that measures it has run in this session."] if session.missing else []
    return [f"# Scaling, on {record_session.title(found)}", "",
            f"Written by `lab.show_record()` at {when}, of what notebook 06 had shown until then. "
            "All numbers are in [numbers.json](numbers.json); [papers.md](papers.md) asks what two "
            "papers say of them.", *on_cpu, *missing, "", "## Machine and versions", "",
            *table(["", ""], [("cores", found["cores"]),
                              ("memory", f"{found['memory'] / 2**30:.1f} GiB"),
                              ("GPUs", _gpus(found)), ("a launch runs", f"{found['ranks']} ranks, "
                                                       f"{found['backend']}"),
                              ("system", found["system"]), ("versions", versions),
                              ("commit of the workbook", found["commit"])], left=2)]


def _gpus(found) -> str:
    return "; ".join(f"{gpu['name']}, {gpu['bytes'] / 2**30:.1f} GiB" for gpu in found["gpus"]
                     ) or "none"


def _numbers(topic, session) -> list[str]:
    rows = session.of_topic(topic)
    if rows:
        return [f"## {TOPICS[topic]}", "", *number_rows(rows)]
    return [f"## {TOPICS[topic]}", "", f"Not measured in this session: {NEEDED[topic]}."
            ] if topic in NEEDED else []


def _guesses(session) -> list[str]:
    return session.guesses and ["## Guesses", "", *table(
        ["exercise", "what", "guess"],
        [(exercise, question, f"{value:g}") for exercise, question, value in session.guesses],
        left=2)]


def _exercises(session) -> list[str]:
    return session.verdicts and ["## Exercises", "", *table(
        ["exercise", "", "what its check said last"],
        [(one.exercise, SIGNS[one.found.passed], one.found.sentence) for one in session.verdicts],
        left=3)]


def _pictures(pictures: list[Result], files) -> list[str]:
    lines = ["## Pictures"] * bool(pictures)
    for one in pictures:
        words = str(one.found)
        first = words.partition("\n")[0].replace("]", ")").replace("[", "(")
        shown = f"![{first}]({files[one.function]})" if one.function in files else (
            "*This picture could not be drawn again.*")
        lines += ["", f"### {_title(one)}", "", shown, "", *_folded("In words", words)]
    return lines


def _texts(texts: list[Result]) -> list[str]:
    lines = ["## Runs and tables"] * bool(texts)
    for one in texts:
        lines += ["", f"### {_title(one)}", "", *_code(str(one.found))]
    return lines


def _title(result) -> str:
    number = f"Exercise {result.exercise}" if result.exercise[:1].isdigit() else result.exercise
    return f"{number}: `{result.function}`"


def _folded(title, words) -> list[str]:
    return [f"<details><summary>{title}</summary>", "", *_code(words), "", "</details>"]


def _code(words) -> list[str]:
    fence = "~~~~" if "```" in words else "```"
    return [f"{fence}text", words, fence]


def _traces(paths) -> list[str]:
    return paths and ["## Traces", "", "For [ui.perfetto.dev](https://ui.perfetto.dev), or "
                      "`labs.meters.trace_file.load`:", "",
                      *(f"- [{path}]({path})" for path in paths)]


def table(head: Sequence[str], rows: Iterable[Sequence[object]], left: int = 1) -> list[str]:
    """Lines of a table; the first `left` columns are set to the left, the others to the right."""
    sides = [":--" if column < left else "--:" for column in range(len(head))]
    return [_line(head), _line(sides), *map(_line, rows)]


def _line(cells) -> str:
    texts = (" ".join(str(cell).split()).replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(texts)} |"


def number_rows(rows: Sequence[Row]) -> list[str]:
    """A table of measured numbers: with predictions and ranges only if one of them has some. What
    was recorded on another machine says so."""
    metrics = [row.metric for row in rows]
    predicted = any(metric.predicted is not None for metric in metrics)
    ranged = any(metric.least is not None for metric in metrics)
    head = ["exercise", "what", "measured", *["predicted", "measured is"] * predicted,
            *["least to most"] * ranged]
    return table(head, [[row.exercise, row.metric.name + " (recorded elsewhere)" * row.recorded,
                         _text(row.metric.value, row.metric.unit),
                         *_predicted(row.metric) * predicted, *[_range(row.metric)] * ranged]
                        for row in rows], left=2)


def _predicted(metric) -> list[str]:
    if metric.predicted is None:
        return ["", ""]
    share = f"{metric.value / metric.predicted - 1:+.1%}" if metric.predicted else ""
    return [_text(metric.predicted, metric.unit), share]


def _range(metric) -> str:
    if metric.least is None or metric.most is None:
        return ""
    return f"{_text(metric.least)} to {_text(metric.most, metric.unit)}"


def _text(value: float, unit: str = "") -> str:
    """Four digits; whole numbers in full, with commas."""
    number = f"{value:,.0f}" if abs(value) >= 1000 or value == round(value) else f"{value:.4g}"
    return f"{number} {unit}".strip()


MAX_NUMBERS = 8  # numbers below a question
BLANK = "\n> \\_\\_\\_\n>\n> \\_\\_\\_\n"


@dataclass(frozen=True)
class Question:
    """where: in the paper. own: which of the student's numbers belong to it; how: to get one."""

    text: str
    where: str
    own: Callable[[Row], bool] = lambda row: False
    how: str = ""


def _about(*topics: str, name: str = "") -> Callable[[Row], bool]:
    """Rows of these topics whose name has a match of `name`."""
    return lambda row: row.topic in topics and bool(re.search(name, row.metric.name, re.IGNORECASE))


PAPERS = {
    "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models. S. Rajbhandari et al., "
    "SC 2020, arXiv 1910.02054": [
        Question("Mixed-precision Adam keeps 16 bytes for each parameter. Which are they, and how "
                 "many of them does your own recipe keep?", "section 3.1",
                 _about("memory", name="parameter|gradient|optimizer|state|resident|step"),
                 "`lab.show_training`, which also draws the memory"),
        Question("Stage 2 sends no more than plain data parallelism, and stage 3 sends 1.5 times "
                 "as much. Which collective replaces which, and where does the half come from?",
                 "section 7", _about("traffic", name="DDP|ZeRO|FSDP|HSDP|all.reduce"),
                 "`lab.show_training` and `lab.show_link_bytes`"),
        Question("Figure 3 shows a throughput that grows faster than the number of GPUs. What "
                 "grows with that number besides the computing power? Is it *your* efficiency?",
                 "section 10 and figure 3", _about("efficiency", name="scaling"),
                 "`lab.show_scaling`"),
        Question("ZeRO-R: which memory is not a model state, and which part of it does ZeRO-DP "
                 "leave as it is?", "sections 3.2 and 6", _about("memory", name="activ|peak"),
                 "`lab.show_training`, which also draws the memory")],
    "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel. Y. Zhao et al., VLDB 2023, "
    "arXiv 2304.11277": [
        Question("Hybrid sharding keeps more of the parameters on each rank. What does it save, "
                 "and on which link?", "section 3.2.2",
                 _about("traffic", "throughput", "memory", name="HSDP|^FSDP|hierarchical|^flat"),
                 "`lab.show_hierarchical` and `lab.show_training`"),
        Question("How do backward and forward prefetching hide an all-gather, and what stays "
                 "exposed in your runs?", "section 3.3",
                 _about("throughput", name="exposed|healthy"), "`lab.show_lost_time`"),
        Question("Why can a CPU thread that runs ahead of the GPU cost memory, and what does the "
                 "rate limiter do? (A CPU run shows nothing of this.)", "section 3.4"),
        Question("How large is one FlatParameter, what does its padding cost, and what replaces "
                 "it in `fully_shard`?", "section 4"),
        Question("TFLOP/s per GPU are reported for models of several sizes. What share of the "
                 "peak is that, and what is yours?", "section 5",
                 _about("efficiency", "throughput", name="MFU|HFU|FLOP|utili|tokens"),
                 "`lab.show_utilization`"),
        Question("For which optimizers is sharded training not equal to training without "
                 "sharding?", "section 7")]}


def papers_page(session: Session) -> str:
    """The page as Markdown: the student's own numbers below the questions that they belong to."""
    lines = ["# Notes on two papers", "",
             "Read the section, answer in a sentence or two, and compare with your own numbers: "
             "they are filled in where this session has measured some."]
    for title, questions in PAPERS.items():
        lines += ["", f"## {title}"]
        for number, question in enumerate(questions, 1):
            lines += ["", f"**{number}. {question.text}** ({question.where})", BLANK,
                      *_own_numbers(question, session)]
    return "\n".join(lines) + "\n"


def _own_numbers(question, session) -> list[str]:
    rows = [row for row in session.rows if question.own(row) and not row.recorded]
    if rows:
        left = len(rows) - MAX_NUMBERS
        more = [f"… and {left} more in numbers.json."] * (left > 0)
        return ["Your numbers:", "", *number_rows(rows[:MAX_NUMBERS]), "", *more]
    return [f"Your number: \\_\\_\\_ (not measured in this session: {question.how})"
            ] if question.how else []
