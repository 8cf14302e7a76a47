"""Exercise 7.17: a split backward fills the bubble, without more memory than 1F1B."""

from labs.checks.verdicts import Wrong, check
from labs.pipeline_parallel.schedule_targets import SIZES, judge_targets
from labs.predictions.pipelines.formulas import ZB_H1
from labs.predictions.pipelines.schedule import Action, Schedule
from labs.predictions.pipelines.simulate import simulate
from labs.words import counted, listed

_HINT = ("No other rank waits for a W. Keep some of them for the end, where 1F1B's later ranks are "
         "idle: how many can rank r delay?")


@check("7.17")
def check_zb_h1(zb_h1):
    """zb_h1(ranks, micro_batches): a list of actions for each rank, with W."""
    return judge_targets(
        zb_h1, ZB_H1, SIZES, _HINT,
        "Activations stay until their W. A rank that delays all of its W holds all micro-batches.",
        _cause)


def _cause(schedule: Schedule, best: Schedule) -> Wrong | None:
    """Where a rank is idle while it computes in the best schedule, and which of its W make the step
    longer. None where their F and B are in another order, which has other causes."""
    if any(_without_w(mine) != _without_w(its)
           for mine, its in zip(schedule.ranks, best.ranks, strict=True)):
        return None
    for rank, actions in enumerate(schedule.ranks):
        missing = [action.micro_batch for action in actions if action.kind == "B"
                   and not schedule.is_split(rank, action.micro_batch)]
        if missing:
            return Wrong(f"rank {rank} has no W({missing[0]}), so its B({missing[0]}) computes "
                         "both gradients", "Each B has a W on the same rank.",
                         code="backward_not_split")
    idle = _idle(schedule, best)
    if not idle:
        return None
    # More slots of idle time that ZB-H1 does not have than on any other rank.
    rank = max(idle, key=lambda rank: sum(idle[rank].values()))
    text = (f"rank {rank} is idle for {counted(round(sum(idle[rank].values())), 'slot')} "
            f"{_where(schedule, list(idle[rank]))}, in which the best schedule computes")
    late = [_after_last_backward(actions) for actions in schedule.ranks]
    if min(late) == schedule.micro_batches > 1:
        return Wrong(f"{text}; every rank runs all its W at the end",
                     "Too many W wait. A rank can run a W wherever it is idle, also between its "
                     "last backwards, and that frees memory. Only the idle time at the end needs "
                     "W that were delayed: how many has rank r?", code="w_at_the_end")
    if all(map(_at_once, schedule.ranks)):
        return Wrong(f"{text}; every W follows its B at once",
                     "No W waits. So each W delays the later B of its rank, and the ranks before "
                     "wait for those B. No rank waits for a W: how many can rank r keep for the "
                     "end, where it is idle?", code="w_at_once")
    extra = [mine - _after_last_backward(actions)
             for mine, actions in zip(late, best.ranks, strict=True)]
    worst = max(range(len(extra)), key=lambda rank: abs(extra[rank]))
    if not extra[worst]:
        return Wrong(text, _HINT, code="too_many_slots")
    return Wrong(f"{text}; rank {worst} has {late[worst]} W after its last B, which is too "
                 f"{'many' if extra[worst] > 0 else 'few'}", _HINT, code="too_many_slots")


def _idle(schedule, best) -> dict[int, dict[Action | None, float]]:
    """By rank: action -> slots that the rank is idle before it, and is not in the best schedule;
    None: after its last action."""
    found, known = _gaps(schedule), _gaps(best)
    more = {rank: {action: slots - known[rank].get(action, 0)
                   for action, slots in gaps.items() if slots > known[rank].get(action, 0)}
            for rank, gaps in enumerate(found)}
    return {rank: gaps for rank, gaps in more.items() if gaps}


def _gaps(schedule) -> list[dict[Action | None, float]]:
    """Of each rank: action -> slots that the rank is idle before it; None: after its last one."""
    timeline = simulate(schedule)
    found = []
    for spans in timeline.spans:
        ends = [0.0, *(span.end for span in spans)]
        gaps = {span.action: span.begin - end for span, end in zip(spans, ends, strict=False)}
        found.append(gaps | {None: timeline.makespan - ends[-1]})
    return found


def _where(schedule, actions) -> str:
    before = [schedule.name(action) for action in actions if action]
    if not before:
        return "at the end"
    return f"before {listed(before)}" + " and at the end" * (None in actions)


def _without_w(actions) -> list[Action]:
    return [action for action in actions if action.kind != "W"]


def _after_last_backward(actions) -> int:
    """How many W stand after the last B of a rank's list."""
    kinds = [action.kind for action in actions]
    return len(kinds) - 1 - max(index for index, kind in enumerate(kinds) if kind == "B")


def _at_once(actions) -> bool:
    """Whether each B is followed by its W."""
    return all(after.kind == "W" and after.micro_batch == action.micro_batch
               for action, after in zip(actions, [*actions[1:], actions[0]], strict=True)
               if action.kind == "B")
