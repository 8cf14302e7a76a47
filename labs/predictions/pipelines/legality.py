"""Whether a pipeline schedule can be run, and if not, the first action that is illegal."""

from collections.abc import Iterator

from labs.predictions.pipelines.schedule import Action, IllegalSchedule, Schedule
from labs.words import counted

_WHAT = {"F": "forward", "B": "backward", "W": "gradient of the weights"}


def require_legal(schedule: Schedule) -> Schedule:
    """The schedule itself; raises IllegalSchedule with one sentence if it cannot be run."""
    found = _first_illegal(schedule)
    if found:
        code, sentence = found
        raise IllegalSchedule(sentence, code)
    return schedule


def first_illegal(schedule: Schedule) -> str | None:
    """One sentence on the first action that is illegal (rank, action, reason), or None.

    Legal is: each stage runs F and B of each micro-batch once, and W at most once; B comes after
    the stage's own F, W after its B; what an action receives is computed by another stage; and the
    orders of the ranks do not wait for each other in a cycle.
    """
    found = _first_illegal(schedule)
    return found and found[-1]


def _first_illegal(schedule) -> tuple[str, str] | None:
    """(code, sentence), or None."""
    # What one rank's own list shows comes first: it may be why another rank waits in vain.
    illegal = min(_illegal_actions(schedule), default=None)
    if illegal:
        return illegal[2:]
    sentence = (min(_never_received(schedule), default=(None,))[-1]
                or next(_missing(schedule), None))
    if sentence:
        return "action_missing", sentence
    sentence = _circle(schedule)
    return sentence and ("deadlock", sentence)


def _illegal_actions(schedule) -> Iterator[tuple[int, int, str, str]]:
    """(index, rank, code, sentence) of each action that its own rank's list makes illegal."""
    for rank, actions in enumerate(schedule.ranks):
        before = set()
        for index, action in enumerate(actions):
            reason = _no_such(schedule, rank, action) or _out_of_order(schedule, action, before)
            before.add(action)
            if reason:
                code, sentence = reason
                yield index, rank, code, f"{_place(schedule, rank, index)}: {sentence}"


def _no_such(schedule, rank, action) -> tuple[str, str] | None:
    """(code, why there is no such action on this rank); None if there is."""
    ranks, (first, last) = len(schedule.ranks), (0, schedule.micro_batches - 1)
    if not 0 <= action.stage < schedule.stages:
        return ("no_such_chunk", f"there is no chunk {action.stage // ranks}; each rank has "
                f"{counted(schedule.chunks, 'chunk')}, numbered from 0")
    if schedule.rank_of(action.stage) != rank:
        return ("wrong_rank",
                f"stage {action.stage} is on rank {schedule.rank_of(action.stage)}")
    if not first <= action.micro_batch <= last:
        return ("no_such_micro_batch",
                f"there is no micro-batch {action.micro_batch}; the last one is {last}")
    return None


def _out_of_order(schedule, action, before) -> tuple[str, str] | None:
    """(code, why the action cannot come after those before it in its list); None if it can."""
    if action in before:
        return "duplicate_action", "the same action is already in the list before it"
    earlier = schedule.own_earlier(action)
    if not earlier or earlier in before:
        return None
    code, when = (("wrong_order", "before") if earlier in schedule.everything
                  else ("action_missing", "without"))
    return code, (f"the {_WHAT[action.kind]} of micro-batch {action.micro_batch} comes {when} its "
                  f"own {_WHAT[earlier.kind]}, {schedule.name(earlier)}")


def _never_received(schedule) -> Iterator[tuple[int, int, str]]:
    """(index, rank, sentence) of each action whose input no stage ever computes."""
    what = {"F": "the output", "B": "the gradient"}
    for rank, actions in enumerate(schedule.ranks):
        for index, action in enumerate(actions):
            source = schedule.source(action)
            if source and source not in schedule.everything:
                yield index, rank, (
                    f"{_place(schedule, rank, index)} waits for {what[action.kind]} of stage "
                    f"{source.stage}, but rank {schedule.rank_of(source.stage)} never runs "
                    f"{schedule.name(source)}")


def _missing(schedule) -> Iterator[str]:
    """A sentence for each F and B that no rank runs."""
    for micro_batch in range(schedule.micro_batches):
        for kind in "FB":
            for stage in range(schedule.stages):
                action = Action(kind, micro_batch, stage)
                if action not in schedule.everything:
                    yield (f"rank {schedule.rank_of(stage)} never runs {schedule.name(action)}, "
                           f"the {_WHAT[kind]} of micro-batch {micro_batch}")


def execution_order(schedule: Schedule) -> list[tuple[int, Action]]:
    """(rank, action) in an order in which everything is computed before it is needed; actions that
    wait for ever are left out. Each rank's own order is kept."""
    order, done, nexts = [], set(), [0] * len(schedule.ranks)
    waiting: dict[Action, int] = {}  # what is waited for -> by which rank; it is needed only once
    todo = list(range(len(schedule.ranks)))
    while todo:
        rank = todo.pop()
        while nexts[rank] < len(schedule.ranks[rank]):
            action = schedule.ranks[rank][nexts[rank]]
            source = schedule.source(action)
            if source and source not in done:
                waiting[source] = rank
                break
            order.append((rank, action))
            done.add(action)
            nexts[rank] += 1
            if action in waiting:
                todo.append(waiting.pop(action))
    return order


def _circle(schedule) -> str | None:
    """A sentence that names the ranks that wait for each other, and for what; None if all end."""
    nexts = [0] * len(schedule.ranks)
    for rank, _ in execution_order(schedule):
        nexts[rank] += 1
    stuck = [rank for rank, index in enumerate(nexts) if index < len(schedule.ranks[rank])]
    if not stuck:
        return None
    path, rank = [], stuck[0]
    # Each stuck rank waits for exactly one other, so the path comes back to a rank on it.
    while rank not in path:
        path.append(rank)
        source = schedule.source(schedule.ranks[rank][nexts[rank]])
        rank = schedule.rank_of(source.stage)
    cycle = path[path.index(rank):]
    waits = [_wait(schedule, rank, nexts[rank]) for rank in cycle]
    first = _place(schedule, cycle[0], nexts[cycle[0]])
    if len(cycle) == 1:
        return f"{first}: {waits[0]}, which comes later in the same list"
    return (f"{first}: the ranks wait in a cycle: {'; '.join(waits)}; each of these comes later "
            "in its rank's list")


def _wait(schedule, rank, index) -> str:
    action = schedule.ranks[rank][index]
    source = schedule.source(action)
    return (f"rank {rank}'s {schedule.name(action)} waits for {schedule.name(source)} of rank "
            f"{schedule.rank_of(source.stage)}")


def _place(schedule, rank, index) -> str:
    return f"rank {rank}, {schedule.name(schedule.ranks[rank][index])} at index {index} of its list"
