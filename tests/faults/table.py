"""The table of faults: what goes wrong, and which message a student must then get, and how soon."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field

from faults import faulty


@dataclass(frozen=True)
class Fault:
    """One row.

    function: what every rank runs. message_parts: pieces of the message (of all that is shown,
    where the launch works). guilty_line: text of the line whose place the message must give.
    within: seconds, alone. error: name of the exception, or None where the launch works. result:
    what it returns then. options: of launch. peers: patterns of a message of a peer launcher that
    would do as well, for the bench; None where the row is about what only ours does.
    """

    function: Callable
    message_parts: tuple[str, ...]
    guilty_line: str | None = None
    within: float = 5.0
    error: str | None = "RankFailed"
    result: object = None
    options: dict = field(default_factory=dict)
    peers: tuple[str, ...] | None = None

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def source(self) -> str:
        return inspect.getsource(self.function)

    @property
    def line(self) -> int:
        """The guilty line, counted from 1 at the `def`."""
        return next(number for number, text in enumerate(self.source.splitlines(), 1)
                    if self.guilty_line in text)

    @property
    def ranks(self) -> int:
        return self.options.get("ranks", 2)


QUICK = {"hang_after": 2}
ENDS = {"timeout": 2}  # of a rank that may be working: no hang, so only a limit ends it
LIMITED = {"memory_limit": 200_000_000}
RANK_0, RANK_1 = (rf"(?i)(rank|process)\W{{0,12}}{rank}\b" for rank in (0, 1))
ALL_REDUCE = "all_reduce (#1)"

EXCEPTIONS = [
    Fault(faulty.raises_on_one, ("rank 1 raised ValueError: not this one", "rank 0 waits in"),
          "raise ValueError", peers=(RANK_1, "not this one")),
    Fault(faulty.raises_on_all, ("raised ValueError: not this one", "did the same"),
          "raise ValueError", peers=("not this one",)),
    Fault(faulty.raises_on_all_one_after_the_other,
          ("rank 0 raised ValueError: not this one", "did the same"),
          "raise ValueError", peers=("not this one",)),
    Fault(faulty.raises_on_rank_0_while_others_wait,
          ("rank 0 raised ValueError", "rank 1 waits in"), "raise ValueError",
          peers=(RANK_0, "not this one")),
    Fault(faulty.raises_in_a_hook, ("rank 1 raised KeyError: 'in the hook'",), "raise KeyError",
          peers=(RANK_1, "in the hook")),
    Fault(faulty.raises_in_a_module, ("rank 1 raised ZeroDivisionError", "users_module.py line 3",
                                     "called at"), "users_module.outer",
          peers=(RANK_1, "ZeroDivisionError", r"users_module.py")),
    Fault(faulty.raises_what_cannot_be_shown, ("raised Broken: (its message cannot be shown",),
          "raise Broken", peers=("Broken",)),
    Fault(faulty.raises_a_flood, ("raised ValueError: word word", "labs.last_failure()"),
          "raise ValueError", peers=("ValueError",)),
]

COLLECTIVES = [
    Fault(faulty.returns_early, ("rank 0 waits in all_reduce (#2)", "rank 1 already returned",
                                "rank 1 never joined all_reduce"), "        dist.all_reduce",
          error="RanksStuck", peers=("all_?reduce", RANK_1)),
    Fault(faulty.never_calls, (f"rank 0 waits in {ALL_REDUCE}", "rank 1 sleeps at"), "time.sleep",
          within=10, error="RanksStuck", options=ENDS, peers=("all_?reduce", RANK_1)),
    Fault(faulty.calls_different_collectives, ("rank 1 calls broadcast", "rank 0 calls all_reduce"),
          "dist.broadcast", error="RanksStuck", peers=("broadcast", "all_?reduce")),
    Fault(faulty.calls_with_different_shapes, ("float32 [2]", "rank 1 calls all_reduce of float32 "
                                              "[3]"), "dist.all_reduce", error="RanksStuck",
          peers=("all_?reduce", r"\b2\b", r"\b3\b")),
    Fault(faulty.calls_with_different_dtypes, ("float32", "rank 1 calls all_reduce of float64"),
          "dist.all_reduce", error="RanksStuck", peers=("(?i)all_?reduce", "(?i)float|double")),
    Fault(faulty.calls_in_different_order, ("float32 [3] (#1)", "float32 [2] (#1)", "same order"),
          "dist.all_reduce", error="RanksStuck", peers=("all_?reduce", r"\b2\b", r"\b3\b")),
    Fault(faulty.calls_on_rank_0_only, (f"rank 0 waits in {ALL_REDUCE}", "rank 1 already returned",
                                       "never joined"), "dist.all_reduce", error="RanksStuck",
          peers=("all_?reduce", RANK_1)),
    Fault(faulty.hangs_without_a_heartbeat, (f"rank 0 waits in {ALL_REDUCE}",
                                             "rank 1 already returned"), "dist.all_reduce",
          error="RanksStuck", options={"timeout": 20}),
    Fault(faulty.receives_what_nobody_sends, ("rank 1 waits in recv", "rank 0 already returned"),
          "dist.recv", within=10, error="RanksStuck", options=QUICK, peers=("recv", RANK_1)),
]

STALLS = [
    Fault(faulty.loops_for_ever, ("rank 1 computes at", f"rank 0 waits in {ALL_REDUCE}",
                                 "is there a loop on rank 1 that never ends?"),
          "while dist.get_rank", within=10,
          error="RanksStuck", options=ENDS, peers=("all_?reduce", RANK_1)),
    Fault(faulty.loops_after_others_returned, ("not done after 2 s", "rank 1 computes at",
                                              "rank 0 already returned"), "get_rank() == 1",
          within=10, error="RanksStuck", options=ENDS, peers=(RANK_1,)),
    Fault(faulty.all_loop, ("ranks 0 and 1 sleep at",), "time.sleep", within=10,
          error="RanksStuck", options=ENDS),
    Fault(faulty.sleeps_an_hour, ("rank 1 sleeps at", "rank 0 waits in barrier"), "time.sleep",
          within=10, error="RanksStuck", options=ENDS, peers=("barrier", RANK_1)),
    Fault(faulty.blocks_in_cpp, ("rank 1 computes at",), "pause()", within=10, error="RanksStuck",
          options=ENDS, peers=("all_?reduce", RANK_1)),
    Fault(faulty.blocks_in_cpp_holding_the_interpreter,
          ("rank 1 does not answer: it is blocked in C++ code at",), "pause()", within=10,
          error="RanksStuck", options=ENDS, peers=("all_?reduce", RANK_1)),
    Fault(faulty.is_suspended, ("no progress for 2 s: rank 1 is suspended", "SIGSTOP",
                                f"rank 0 waits in {ALL_REDUCE}"), "dist.all_reduce", within=10,
          error="RanksStuck", options=QUICK),
    Fault(faulty.is_suspended_in_a_message, ("no progress for 2 s: rank 1 is suspended", "SIGSTOP",
                                             f"rank 0 waits in {ALL_REDUCE}"),
          "dist.all_reduce", within=10, error="RanksStuck", options=QUICK),
]

EXITS = [
    Fault(faulty.calls_sys_exit, ("rank 1 called sys.exit(3)",), "sys.exit", peers=(RANK_1, "3")),
    Fault(faulty.calls_os_exit, ("rank 1 ended its process with exit code 3",),
          peers=(RANK_1, "3")),
    Fault(faulty.is_killed, ("rank 1 was killed by signal 9 (SIGKILL), probably because the "
                             "machine ran out of memory",), peers=(RANK_1, "SIGKILL|signal 9|-9")),
    Fault(faulty.is_killed_in_a_message, ("rank 1 was killed by signal 9 (SIGKILL)",)),
    Fault(faulty.crashes, ("rank 1 was killed by signal 11 (SIGSEGV): a crash in C++",),
          "ctypes.string_at", peers=(RANK_1, "SIGSEGV|signal 11|-11")),
    Fault(faulty.aborts, ("rank 1 was killed by signal 6 (SIGABRT)",), "os.abort",
          peers=(RANK_1, "SIGABRT|signal 6|-6")),
    Fault(faulty.raises_keyboard_interrupt, ("rank 1 raised KeyboardInterrupt",),
          "raise KeyboardInterrupt", peers=(RANK_1, "KeyboardInterrupt")),
    Fault(faulty.destroys_the_group, ("process group has not been initialized",),
          "dist.all_reduce", peers=("process group has not been initialized",)),
]

MEMORY = [
    Fault(faulty.wants_too_much_on_one, ("rank 1 ran out of memory", "asked for 400 MB",
                                        "memory_limit is 200 MB"), "torch.empty",
          error="OutOfMemory", options=LIMITED),
    Fault(faulty.wants_too_much_on_all, ("rank 0 ran out of memory", "asked for 400 MB",
                                        "rank 1 did the same"), "torch.empty",
          error="OutOfMemory", options=LIMITED),
    Fault(faulty.grows_too_much, ("ran out of memory: it held ",
                                  "asked for 4 MB; its memory_limit is 200 MB"),
          "torch.ones", error="OutOfMemory", options=LIMITED),
    Fault(faulty.wants_a_large_array, ("asked for 400 MB",), "np.ones", error="OutOfMemory",
          options=LIMITED),
    Fault(faulty.wants_more_than_the_machine_has, ("the machine has no more",), "torch.empty",
          error="OutOfMemory", peers=("can't allocate memory",)),
]

VALUES = [
    Fault(faulty.returns_a_lock, ("rank 1 returned a lock, which cannot be sent back",)),
    Fault(faulty.returns_a_generator, ("rank 1 returned a generator, which cannot be sent back",)),
    Fault(faulty.returns_an_open_file, ("rank 1 returned an open file (/dev/null), which",)),
]

OUTPUT = [
    Fault(faulty.reports_nan, ("UserWarning: loss is nan at step 1 on rank 0",), error=None,
          result=[0, 1]),
    Fault(faulty.prints_a_flood, ("rank 3 │ line 0\n", "99,780 lines are not shown",
                                 "rank 0 │ line 99999\n"), error=None, result=[0, 1, 2, 3],
          within=30, options={"ranks": 4}),
    Fault(faulty.prints_a_blob, ("rank 0 │ before\n", "rank 1 │ (bytes that are no text",
                                "rank 1 │ after\n"), error=None, result=[0, 1]),
    Fault(faulty.asks_for_input, ("a rank has no keyboard",), "return input",
          peers=("EOF|input|stdin",)),
    Fault(faulty.warns_on_every_rank, ("ranks 0–2 │ UserWarning: careful, at",), "warnings.warn",
          error=None, result=[0, 1, 2], options={"ranks": 3}),
    Fault(faulty.warns_in_a_forked_child, ("UserWarning: from a child",), error=None,
          result=[0, 0], options={"timeout": 10}),
    Fault(faulty.reports_in_a_forked_child, (), error=None, result=[0, 0], within=10,
          options={"timeout": 20}),
    Fault(faulty.launches_again, ("launch was called on a rank",), "return launch"),
]

FAULTS = [*EXCEPTIONS, *COLLECTIVES, *STALLS, *EXITS, *MEMORY, *VALUES, *OUTPUT]
