"""Command line of scripts/report: a run's page again, or a page that lays two runs side by side."""

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EPILOG = """\
examples:
  scripts/report experiments/2026-11-22-laptop                     writes its report.html again
  scripts/report --compare experiments/laptop experiments/node     writes compare.html here
"""


def check(arguments: list) -> argparse.Namespace:
    """The parsed command line; exits with a sentence if it is wrong."""
    parser = argparse.ArgumentParser(
        prog="scripts/report", formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Make pages of what scripts/solutions has found.", epilog=EPILOG)
    parser.add_argument("run", nargs="?", metavar="RUN", help="a folder with results.json")
    parser.add_argument("--compare", nargs=2, metavar=("A", "B"), help="two such folders")
    parser.add_argument("--out", metavar="PAGE", help="the page to write (compare.html)")
    options = parser.parse_args(arguments)
    if bool(options.run) == bool(options.compare):
        parser.error("give one folder, or --compare and two")
    for folder in options.compare or [options.run]:
        if not os.path.isfile(os.path.join(folder, "results.json")):
            parser.error(f"there is no results.json in {folder}: name a folder that "
                         "scripts/solutions has written")
    return options


def main() -> int:
    from _unattended import reference

    from _solutions import report, results

    options = check(sys.argv[1:])
    if options.run:
        out = Path(options.run)
        data = results.read(out / "results.json")
        page = report.page(data, out, reference.of_run(data, ROOT))
        target = out / "report.html"
    else:
        runs = [results.read(Path(folder) / "results.json") for folder in options.compare]
        page, target = side_by_side(*runs), Path(options.out or "compare.html")
    target.write_text(page)
    print(target)
    return 0


def side_by_side(one: dict, other: dict) -> str:
    """The page of two runs: their machines, minutes, and every metric that both have."""
    from _solutions import markup

    title = f"{one['machine']['title']} beside {other['machine']['title']}"
    return markup.document(title, "Two runs of the workbook's solutions", [
        _machines(one, other), _notebooks(one, other), _metrics(one, other)])


def _machines(one, other) -> str:
    from _solutions import markup

    facts = [{"date": run["date"][:10], "commit": run["commit"],
              **{name: value for name, value in run["machine"].items() if name != "gpus"}}
             for run in (one, other)]
    rows = [[markup.text(name), *(markup.text(fact.get(name) or "–") for fact in facts)]
            for name in dict.fromkeys([*facts[0], *facts[1]])]
    return "<h2>Machines</h2>" + markup.table("Both runs", ["what", "A", "B"], rows)


def _notebooks(one, other) -> str:
    from _solutions import markup, report

    found = [{each["name"]: each for each in run["notebooks"]} for run in (one, other)]
    rows = []
    for name in dict.fromkeys([*found[0], *found[1]]):
        both = [run.get(name, {"outcome": "–", "seconds": 0}) for run in found]
        rows.append([markup.text(name), *(report.outcome(each["outcome"]) for each in both),
                     *(report.minutes(each["seconds"]) for each in both)])
    return "<h2>Notebooks</h2>" + markup.table(
        "Outcome and minutes", ["notebook", "A", "B", "minutes A", "minutes B"], rows,
        numbers=2)


def _metrics(one, other) -> str:
    from _solutions import markup, report, results

    mine, its = results.metrics(one), results.metrics(other)
    beyond = {key for key, *_ in report.differing(one, other)}
    rows = []
    for key in (key for key in mine if key in its):
        a, b = mine[key], its[key]
        ratio = f"{b['value'] / a['value']:.3g}" if a["value"] and b["value"] else "–"
        if key in beyond:
            ratio = f"<span class='bad'>≠ {ratio}</span>"
        rows.append([markup.text(key[2]), markup.where(*key[:2]),
                     report.spread(a), report.spread(b), ratio])
    if not rows:
        return "<h2>Metrics</h2><p>The two runs have no metric in common.</p>"
    return (f"<h2>Metrics</h2><p>{len(beyond)} of {len(rows)} differ by more than their spread; "
            "≠ marks them.</p>" + markup.table(
                "Every metric that both have", ["what", "where", "A", "B", "B / A"], rows,
                numbers=3))


if __name__ == "__main__":
    sys.exit(main())
