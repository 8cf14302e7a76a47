"""The judge: calls our check, in a process that has nothing of the submission's but plain data.

The check is the same as in the notebook. In the place of the submission's functions it gets
proxies (remote), which call them in the submission's process. The numbers that it asks for come
from the secret seed of the grading run.
"""

import hashlib
import json
import linecache
import os
import random
import sys
from importlib import import_module

from _grade import answering, inside, remote, started
from _grade.outcomes import BROKEN, FORGED, PASSED, WAITING, WRONG

_OUTCOMES = {True: PASSED, False: WRONG, None: WAITING}


def main(job: int, verdict: int, link: int) -> None:
    """Judges the exercise that comes on the descriptor `job`; never returns."""
    inside.start_fork_server(close=(job, verdict, link))
    with open(job, "rb") as file:
        work = json.load(file)
    seed = os.environ["WORKBOOK_SEED"]
    number = int(hashlib.sha256(seed.encode()).hexdigest()[:8], 16)
    random.seed(seed)
    sys.modules["torch"].manual_seed(number)
    sys.modules["numpy"].random.seed(number)
    outcome, sentence, hint = judged(work, remote.Link(link))
    with open(verdict, "wb") as file:
        file.write(json.dumps([outcome, sentence, hint]).encode())
    os._exit(0)


def judged(work: dict, link: remote.Link) -> tuple[str, str, str]:
    """(outcome, sentence, hint) of the answers at the other end of a link."""
    from labs.checks.student_code import message_of

    for cell in work["cells"]:  # for messages, and to see whether a script has gaps: nothing of it
        if cell["file"]:  # is run here
            answering.write_script(cell)
        name, source = cell["name"], cell["source"]
        linecache.cache[name] = len(source), None, source.splitlines(True), name
    check = getattr(import_module(work["package"]), work["check"])
    other = remote.Remote(link, [cell["name"] for cell in work["cells"]])
    started.elsewhere(other.start, remote.Forged)
    try:
        try:
            answers = other.answers()
        except (remote.Forged, remote.Ended):
            raise
        except BaseException as error:  # what defining them raised
            return WRONG, _why(error), ""
        try:
            verdict = check(*answers)
        except (remote.Forged, remote.Ended):
            raise
        except BaseException as error:  # of no line of the submission's
            return WRONG, f"the check could not go on: {message_of(error)}", ""
    except remote.Forged as error:
        return FORGED, str(error), ""
    except remote.Ended:
        return BROKEN, ("its processes ended before the check said anything: killed, out of "
                        "memory, or ended by themselves"), ""
    return _OUTCOMES[verdict.passed], verdict.sentence, verdict.hint


def _why(error) -> str:
    """What defining the answer raised, and the submission's line."""
    from labs.checks.student_code import message_of, own_place

    place = own_place(error)
    return message_of(error) + (f"\n    {place}:  {place.source}" if place else "")
