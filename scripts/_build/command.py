"""The command line of `scripts/build`."""

import argparse
import sys
import time
from pathlib import Path

import _notebooks

ABOUT = """\
Builds, from each solutions/NN_name.py, the executed solution solutions/NN_name.ipynb and the
student's notebooks/NN_name.ipynb, in which '### BEGIN SOLUTION' ... '### END SOLUTION' are gaps.
A cell tagged solution-only or student-only stands in one of the two notebooks only. A cell that is
lab.write_script("NAME.py") becomes %%writefile NAME.py and the text of solutions/scripts/NAME.py."""


def parse(arguments):
    """The parsed command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/build",
        description=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="00, 02_manual_ddp or a path; 07 is 07a to 07d; all sources without any",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--check",
        action="store_true",
        help="write nothing; exit 1 if a generated notebook is stale",
    )
    how.add_argument(
        "--student-only",
        action="store_true",
        help="write only the student notebooks; execute nothing",
    )
    how.add_argument(
        "--no-execute",
        action="store_true",
        help="write both, keeping earlier outputs of cells that did not change",
    )
    how.add_argument(
        "--minutes",
        action="store_true",
        help="write nothing; print what is in each notebook, and how many minutes it takes by rule",
    )
    parser.add_argument(
        "--root",
        type=Path,
        default=Path(__file__).resolve().parents[2],
        help="the tree with solutions/ and notebooks/ (default: this one)",
    )
    return parser.parse_args(arguments)


def check(arguments):
    """Exit with a sentence if the arguments are wrong; nothing has to be installed for that."""
    options = parse(arguments)
    problems = find_sources(options.root.resolve(), options.names)[1]
    if problems:
        sys.exit("\n".join(problems))


def find_sources(root, names):
    """(names of the lessons asked for, problems). '00', '00_start_here' and paths are names."""
    known = [path.stem for path in _notebooks.paths(root / "solutions")]
    if not names:
        return known, []
    chosen, problems = [], []
    for wanted in names:
        found = _notebooks.chosen(wanted, known)
        chosen += found
        if not found:
            problems.append(f"There is no solutions/{Path(wanted).stem}.py; there are: {', '.join(known)}.")
    return sorted(set(chosen)), problems


def main(arguments=None):
    """Run the command; returns the exit status: 0 done, 1 something is wrong, 130 interrupted."""
    options = parse(arguments)
    try:
        problems = _run(options)
    except KeyboardInterrupt:
        print("\nInterrupted: the notebook that was being built is as it was.", file=sys.stderr)
        return 130
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def _run(options):
    """Do what the options say; returns everything that is wrong, one sentence each."""
    from _build import build  # here, so that --help works before anything is installed

    options.root = options.root.resolve()
    names, problems = find_sources(options.root, options.names)
    if not names and not problems and not options.check:
        return [f"There is no solutions/NN_name.py in {options.root} to build."]
    lessons = [build.read_lesson(options.root, name) for name in names]
    problems += [problem for lesson in lessons for problem in lesson.problems]
    if options.check:
        return problems + list(_stale(build, options, lessons))
    if problems:
        return problems
    if options.minutes:
        return _print_minutes(lessons, options.root)
    return [problem for lesson in lessons for problem in _build_one(build, options, lesson)]


def _print_minutes(lessons, root):
    from _build import minutes

    print(minutes.HEADER)
    for lesson in lessons:
        print(minutes.row(lesson.name, lesson.cells, lesson.solution_path, root))
    return []


def _stale(build, options, lessons):
    for lesson in lessons:
        if not lesson.problems:
            yield from build.stale_files(lesson)
    if not options.names:
        yield from build.orphans(options.root)


def _build_one(build, options, lesson):
    """Write the lesson's notebooks and a progress line; returns problems."""
    print(f"{lesson.name}: {len(lesson.cells)} cells ", end="", flush=True)
    start, problems = time.perf_counter(), []
    if options.no_execute:
        solution = build.keep_earlier_outputs(lesson)
    elif not options.student_only:
        solution, problems = build.run(lesson)
    if not problems and not options.student_only:
        build.write(lesson.solution_path, solution)
    if not problems:
        build.write(lesson.student_path, lesson.student)
    outcome = "failed after" if problems else "built in"
    print(f"{outcome} {time.perf_counter() - start:.1f} s", flush=True)
    return problems
