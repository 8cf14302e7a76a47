"""The README of a record."""

from labs.exercises.records import Result
from labs.exercises.verdicts import SIGNS
from labs.scaling.record import machine
from labs.scaling.record.markdown import number_rows, table
from labs.scaling.record.session import NEEDED, TOPICS, Session


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
    return [f"# Scaling, on {machine.title(found)}", "",
            f"Written by `lab.document()` at {when}, of what notebook 06 had shown until then. All "
            "numbers are in [numbers.json](numbers.json); [papers.md](papers.md) asks what two "
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
