"""Exercise 5.10: the exposed seconds of a recorded step, read from the file without the lab."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

from labs.checks.numbers import Cause, judge_number
from labs.checks.verdicts import Wrong, check, shows
from labs.fsdp_profiling import synthetic_files
from labs.fsdp_profiling.recorded_runs import RecordedRun
from labs.fsdp_profiling.shared_recording import recorded
from labs.meters import trace_events, trace_file
from labs.meters.trace import Span, clip, subtract, total_seconds, union
from labs.pictures.tables import Table

_HINTS = {
    "KeyError: 'dur'": 'Only events whose "ph" is "X" have a duration.',
    "KeyError: 'cat'": 'Only events whose "ph" is "X" are sure to have a category.',
    "UnicodeDecodeError": "A file whose name ends in .gz is compressed: gzip.open.",
    "BadGzipFile": "Only a file whose name ends in .gz is compressed.",
    "too many values to unpack": 'On a GPU a label is there twice: yours has the category '
                                 '"user_annotation".'}
_RULE = "In flight, and not computing, inside the step: subtract intervals, then add up."


@check("5.10", device=None, hints=_HINTS)
def check_exposed_seconds(exposed_seconds: Callable):
    """exposed_seconds(path): of a trace file's step, read by json and gzip alone."""
    with tempfile.TemporaryDirectory() as folder:
        for name, path in synthetic_files.write(Path(folder)):
            _judge(exposed_seconds, path, f"file {name!r}", 1e-6, 1e-6)
    # A recorded file has thousands of events, and `.item()`, whose microseconds the lab leaves out.
    for trace in recorded():
        _judge(exposed_seconds, trace.path, f"recorded just now, rank {trace.rank}", 1e-2, 1e-4)
    return (f"right on {len(synthetic_files.FILES)} synthetic files, one of them a GPU's, and on "
            "every rank of a run recorded just now")


def _judge(exposed_seconds, path, what, rel_tol, abs_tol):
    want, causes = exposed_in_step(path), _causes(path)
    with _lab_refused():
        got = exposed_seconds(str(path))
    # A moment counts if it lies in the step, a collective is in flight, and no operation of the
    # rank's own threads runs: by intervals, so that nothing counts twice.
    judge_number(got, want, causes, f"{what}: the exposed time", "s", _RULE, rel_tol=rel_tol,
                 abs_tol=abs_tol)


def exposed_in_step(path) -> float:
    """Returns the seconds of exposed communication inside the recorded step, as the lab reads the
    file."""
    trace = trace_file.load(path)
    return sum(total_seconds(clip(trace.exposed, step)) for step in trace.steps)


def _lab_refused():
    """Refuses the lab's reader, whichever of its functions is called."""
    def refuse(path):
        raise Wrong("the lab's reader opens the file", "Open it with json and gzip.",
                    code="ready_made")

    return mock.patch.object(trace_file, "_open", refuse)


class _File:
    """The events of a file, read with one thing or another done differently."""

    def __init__(self, path):
        self.events = [one for one in trace_file.read_events(path) if one["ph"] == "X"]
        # gloo's threads copy and add for collectives with aten:: operations: that is no computing.
        self.gloo = {one["tid"] for one in self.events if one["name"].startswith("gloo:")}
        self.on_gpu = any(one["cat"] == "kernel" for one in self.events)
        self.pause = 0.0 if self.on_gpu else trace_events.GAP  # that counts as computing
        # A GPU's file has the label twice: gpu_user_annotation is its span on the GPU.
        self.label = next(one for one in self.events if one["name"] == "labs::step"
                          and one["cat"] == "user_annotation")
        self.step = self._span(self.label)

    def _span(self, one) -> Span:
        begin = (one["ts"] - self.label["ts"]) / 1e6
        return Span(one["name"], one["cat"], begin, begin + one["dur"] / 1e6)

    def flies(self, one) -> bool:
        # Where ranks share a GPU, gloo carries their collectives, and no slow link holds them.
        return _is_flight(one) or self.on_gpu and one["name"].startswith("gloo:")

    def computes(self, one) -> bool:
        return _is_work(one, self.on_gpu) and one["tid"] not in self.gloo

    def intervals(self, chosen, gap=0.0, inside=True) -> list:
        found = union(map(self._span, filter(chosen, self.events)), gap)
        return clip(found, self.step) if inside else found

    def exposed(self, flying=None, busy=None, gap=None, inside=True) -> float:
        return total_seconds(subtract(
            self.intervals(flying or self.flies, inside=inside),
            self.intervals(busy or self.computes, self.pause if gap is None else gap, inside)))


def _causes(path) -> Iterator[Cause]:
    """What mistakes lead to; each gives another number than the right one on some file. Nothing is
    read before the first is asked for: a right answer needs none."""
    file = _File(path)
    # 0 has no certain cause
    yield from (cause for cause in [*_of_the_sum(file), *_of_the_choice(file)] if cause.number)


def _of_the_sum(file) -> list[Cause]:
    """Mistakes in what is added up, and in which unit."""
    want, flying = file.exposed(), total_seconds(file.intervals(file.flies))
    busy = total_seconds(file.intervals(file.computes, file.pause))
    return [
        Cause("in_microseconds", 1e6 * want, "that is in microseconds",
              "Return seconds: ts and dur are microseconds."),
        Cause("in_milliseconds", 1e3 * want, "that is in milliseconds", "Return seconds."),
        Cause("share_step", want / file.step.seconds, "that is a share of the step",
              "Return seconds."),
        Cause("counts_in_flight_outside_step", file.exposed(inside=False),
              "that counts what is in flight outside the step",
              "The label labs::step says when the step begins and ends."),
        Cause("all_communication", flying, "that is all communication, hidden or not", _RULE),
        Cause("sum_collectives_durations",
              sum(one["dur"] for one in file.events if file.flies(one)) / 1e6,
              "that is the sum of the collectives' durations", _RULE),
        Cause("all_time_without_computing", file.step.seconds - busy,
              "that is all the time without computing",
              "Count only where a collective is in flight."),
        Cause("subtracts_seconds_from_seconds", flying - busy,
              "that subtracts seconds from seconds",
              "Computing without communication has nothing to subtract from: subtract intervals."),
        Cause("leaves_out_rule_for_pauses", file.exposed(gap=0.0),
              "that leaves out the rule for pauses", "Pauses of at most 0.5 ms, which is 500 of "
              "the file's units, count as computing on a CPU."),
        Cause("counts_gpu_pauses_computing", file.exposed(gap=trace_events.GAP),
              "that counts a GPU's pauses as computing",
              "The rule for pauses is for a CPU, where Python runs in them.")]


def _of_the_choice(file) -> list[Cause]:
    """Mistakes in which events are taken for computing, or for a collective in flight."""
    def also(beginning):
        return file.exposed(lambda one: file.flies(one) or one["name"].startswith(beginning))

    return [
        Cause("counts_gloo_threads_computing",
              file.exposed(busy=lambda one: _is_work(one, file.on_gpu)),
              "that counts what gloo's threads do as computing", "They add and copy for "
              "collectives: leave out each thread that has events named gloo:..."),
        Cause("counts_main_thread_computing_alone",
              file.exposed(busy=lambda one: file.computes(one) and one["tid"] == file.label["tid"]),
              "that counts the main thread's computing alone", "Backward may run in a thread of "
              "its own, a GPU's kernels run on streams: leave out gloo's threads only."),
        Cause("counts_gloo_own_work", also("gloo:"),
              "that counts gloo's own work as in flight, too",
              "On the slow link a collective is in flight while its label link:... lasts."),
        Cause("takes_fsdp_labels_for_collectives", also("FSDP::"),
              "that takes FSDP's labels for collectives",
              "Names of collectives begin with link: or nccl."),
        Cause("takes_nccl_labels_for_collectives", also("nccl"),
              "that takes NCCL's labels for collectives",
              "On a GPU a collective is a kernel; its label lasts only while it is launched."),
        Cause("counts_calls", file.exposed(lambda one: one["name"].startswith("c10d::")),
              "that counts the calls, not the time in flight",
              "The labels link:... say when a collective is in flight."),
        Cause("counts_other_operations_than_aten",
              file.exposed(busy=lambda one: one["cat"] == "cpu_op" and one["tid"] not in file.gloo),
              "that counts other operations than aten:: as computing",
              "Only what begins with aten:: computes; the other names are autograd's and c10d's."),
        Cause("takes_cpu_for_computing", file.exposed(busy=lambda one: _is_work(one, False)),
              "that takes what the CPU does for computing",
              "In a GPU's file the kernels compute; the CPU only launches them.")]


def _is_flight(one) -> bool:
    return one["name"].startswith("link:") or (one["cat"] == "kernel"
                                               and one["name"].startswith("nccl"))


def _is_work(one, on_gpu) -> bool:
    """Whether an event is computing, in whichever thread."""
    if on_gpu:
        return one["cat"] in ("kernel", "gpu_memcpy", "gpu_memset") and not _is_flight(one)
    return one["cat"] == "cpu_op" and one["name"].startswith("aten::")


@shows("5.10")
def show_own_reader(exposed_seconds: Callable[[str], float], *runs: RecordedRun):
    """Returns a table of recorded steps: the exposed milliseconds that the student's function reads
    from each file, and those that the lab reads."""
    rows = [(run.config.name, trace.rank, f"{1e3 * trace.seconds:.1f}",
             *(f"{1e3 * read(trace.path):.2f}" for read in (exposed_seconds, exposed_in_step)))
            for run in runs for trace in run]
    return Table("exposed communication of recorded steps, from their files",
                 ("run", "rank", "step, ms", "exposed, ms, by your reader", "by the lab's"), rows,
                 left=1)
