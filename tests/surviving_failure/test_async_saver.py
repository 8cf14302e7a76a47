"""Exercise 8.5: what its check must reject, with the words that must say why; and what it must
accept."""

import copy
import pickle
import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from _build.definitions import definitions
from answers import assert_rejected, assert_waits

import labs.surviving_failure as lab

pytestmark = pytest.mark.usefixtures("warm_launcher")
Right = definitions("08_surviving_failure").AsyncSaver


class Nothing(Right):
    def save(self, path, state):
        return None


class Synchronous(Right):
    def save(self, path, state):
        self.write(path, lab.to_bytes(state))


class WaitsForItsOwn(Right):
    def save(self, path, state):
        super().save(path, state)
        self.close()


class SavedByRank0Alone(Right):
    def save(self, path, state):
        if dist.get_rank() == 0:
            super().save(path, state)


class WaitsWithOtherRanks(Right):
    """So that all ranks have saved when the step ends."""

    def save(self, path, state):
        super().save(path, state)
        if dist.get_world_size() > 1:
            self.close()
            dist.barrier()


class NoSnapshot(Right):
    def save(self, path, state):
        self.close()
        self.in_flight = self.pool.submit(lambda: self.write(path, lab.to_bytes(state)))


class ShallowCopy(Right):
    def save(self, path, state):
        self.close()
        state = state.copy()
        self.in_flight = self.pool.submit(lambda: self.write(path, lab.to_bytes(state)))


class CopiesOfTheOutermost(Right):
    """The tensors of the model, but neither the optimizer's nor lists."""

    def save(self, path, state):
        self.close()
        state = dict(state, model={name: value.clone() for name, value in state["model"].items()})
        self.in_flight = self.pool.submit(lambda: self.write(path, lab.to_bytes(state)))


class WritesTensors(Right):
    def save(self, path, state):
        self.close()
        self.in_flight = self.pool.submit(self.write, path, copy.deepcopy(state))


class Overlap(Right):
    def __init__(self, write):
        super().__init__(write)
        self.pool, self.all = ThreadPoolExecutor(4), []

    def save(self, path, state):
        self.all.append(self.pool.submit(self.write, path, lab.to_bytes(state)))

    def close(self):
        while self.all:
            self.all.pop().result()


class Queued(Overlap):
    """One write after the other, but a snapshot for each save that waits."""

    def __init__(self, write):
        super().__init__(write)
        self.pool = ThreadPoolExecutor(1)


class NewerDropped(Right):
    def save(self, path, state):
        if self.in_flight is None or self.in_flight.done():
            super().save(path, state)


class SnapshotBeforeItWaits(Right):
    def save(self, path, state):
        data = lab.to_bytes(state)
        self.close()
        self.in_flight = self.pool.submit(self.write, path, data)


class SecondCopyKept(Right):
    def save(self, path, state):
        self.close()
        state = copy.deepcopy(state)
        self.in_flight = self.pool.submit(lambda: self.write(path, lab.to_bytes(state)))


class SnapshotKept(Right):
    def save(self, path, state):
        self.close()
        self.data = lab.to_bytes(state)
        self.in_flight = self.pool.submit(self.write, path, self.data)


class NeverJoined(Right):
    def save(self, path, state):
        super().close()
        self.in_flight = self.pool.submit(self.write, path, lab.to_bytes(state))

    def close(self):
        return None


class WaitsAndDoesNotAsk(Right):
    def close(self):
        self.pool.shutdown()

    def save(self, path, state):
        self.close()
        self.pool = ThreadPoolExecutor(1)
        self.in_flight = self.pool.submit(self.write, path, lab.to_bytes(state))


class OnlyALock(Right):
    """Writes do not overlap, snapshots do."""

    def __init__(self, write):
        self.write, self.lock, self.threads = write, threading.Lock(), []

    def save(self, path, state):
        def run(data):
            with self.lock:
                self.write(path, data)

        self.threads.append(threading.Thread(target=run, args=(lab.to_bytes(state),)))
        self.threads[-1].start()

    def close(self):
        while self.threads:
            self.threads.pop().join()


class PastTheDisk(Right):
    def save(self, path, state):
        self.close()
        self.in_flight = self.pool.submit(path.write_bytes, lab.to_bytes(state))


class Pickled(Right):
    def save(self, path, state):
        self.close()
        self.in_flight = self.pool.submit(self.write, path, pickle.dumps(state))


class ErrorSwallowed(Right):
    def close(self):
        try:
            super().close()
        except Exception as error:
            print(error)


class ErrorOfThreadLost(Right):
    def save(self, path, state):
        self.close()
        self.in_flight = threading.Thread(target=self.write, args=(path, lab.to_bytes(state)))
        self.in_flight.start()

    def close(self):
        if self.in_flight is not None:
            self.in_flight.join()
        self.in_flight = None


class ErrorsOfTheDiskOnly(Right):
    def save(self, path, state):
        def run(path, data):
            try:
                return self.write(path, data)
            except OSError as error:
                return error
            except Exception:
                return None

        self.close()
        self.in_flight = self.pool.submit(run, path, lab.to_bytes(state))

    def close(self):
        future, self.in_flight = self.in_flight, None
        if future is not None and future.result() is not None:
            raise future.result()


class ErrorAtCloseOnly(Right):
    def save(self, path, state):
        if self.in_flight is not None and self.in_flight.exception() is None:
            self.in_flight.result()
        self.in_flight = self.pool.submit(self.write, path, lab.to_bytes(state))


class ErrorForEver(Right):
    def close(self):
        if self.in_flight is not None:
            self.in_flight.result()
            self.in_flight = None


class CollectiveInTheThread(Right):
    """It meets the job's collectives in the same group."""

    def save(self, path, state):
        def run(data):
            self.write(path, data)
            dist.barrier()

        self.close()
        self.in_flight = self.pool.submit(run, lab.to_bytes(state))


class OwnThread:
    """Without a pool."""

    def __init__(self, write):
        self.write, self.thread, self.error = write, None, None

    def save(self, path, state):
        self.close()
        self.thread = threading.Thread(target=self._run, args=(path, lab.to_bytes(state)))
        self.thread.start()

    def _run(self, path, data):
        try:
            self.write(path, data)
        except BaseException as error:
            self.error = error

    def close(self):
        if self.thread is not None:
            self.thread.join()
        error, self.thread, self.error = self.error, None, None
        if error is not None:
            raise RuntimeError("the last save failed") from error


class OneWorker:
    """A thread that lives as long as the saver, and a queue with room for nothing."""

    def __init__(self, write):
        self.write, self.queue, self.error = write, queue.Queue(), None
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self):
        while True:
            path, data = self.queue.get()
            try:
                self.write(path, data)
            except Exception as error:
                self.error = error
            del data
            self.queue.task_done()

    def save(self, path, state):
        self.close()
        self.queue.put((path, lab.to_bytes(state)))

    def close(self):
        self.queue.join()
        error, self.error = self.error, None
        if error is not None:
            raise error


class CopyThatIsDropped(Right):
    """The thread makes bytes, and drops the copy before it writes."""

    def save(self, path, state):
        def run(states):
            data = lab.to_bytes(states.pop())
            self.write(path, data)

        self.close()
        self.in_flight = self.pool.submit(run, [copy.deepcopy(state)])


SYNCHRONOUS = "blocks_on_disk returns"
OTHER_VALUES = "not_a_snapshot"
WORDS = {
    Nothing: "nothing_saved",
    Synchronous: "blocks_on_disk itself",
    WaitsForItsOwn: SYNCHRONOUS,
    SavedByRank0Alone: "save_lost rank",
    WaitsWithOtherRanks: "blocks_on_disk steps",
    NoSnapshot: OTHER_VALUES,
    ShallowCopy: OTHER_VALUES,
    CopiesOfTheOutermost: "not_a_snapshot 'optimizer'",
    WritesTensors: "wrong_type",
    Overlap: "several_in_flight writes",
    Queued: "several_in_flight snapshots",
    NewerDropped: "save_lost second_2.pt",
    SnapshotBeforeItWaits: "memory_kept second",
    SecondCopyKept: "memory_kept flight",
    SnapshotKept: "memory_kept after",
    NeverJoined: "close_does_not_wait",
    WaitsAndDoesNotAsk: "error_lost",
    OnlyALock: "several_in_flight snapshots",
    PastTheDisk: "nothing_saved",
    Pickled: "unreadable_file",
    ErrorSwallowed: "error_lost",
    ErrorOfThreadLost: "error_lost",
    ErrorsOfTheDiskOnly: "error_lost DiskFailed",
    ErrorAtCloseOnly: "error_lost next",
    ErrorForEver: "error_repeated",
    CollectiveInTheThread: "no_progress|deadlock|collectives_differ",
}


@pytest.mark.parametrize("answer", WORDS, ids=lambda answer: answer.__name__)
def test_wrong_answer(answer):
    assert_rejected(lab.check_async_saver(answer), WORDS[answer])


@pytest.mark.parametrize("answer", [Right, OwnThread, OneWorker, CopyThatIsDropped])
def test_right_answer(answer):
    verdict = lab.check_async_saver(answer)
    assert verdict.passed, str(verdict)


def test_waits():
    class Unfilled(Right):
        def save(self, path, state):
            raise NotImplementedError("Exercise 8.5")

    verdict = lab.check_async_saver(Unfilled)
    assert verdict.passed is None, str(verdict)
    assert_waits(lab.check_async_saver, "8.5")
