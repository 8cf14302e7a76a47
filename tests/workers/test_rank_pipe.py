"""Messages of a rank's connection, whole, in pieces and half."""

import multiprocessing
import os
import struct
import threading
import time

import pytest

from labs.workers.rank_pipe import RankPipe


@pytest.fixture
def ends():
    """The caller's end and the rank's, which is an ordinary Connection."""
    ours, theirs = multiprocessing.Pipe()
    pipe = RankPipe(ours)
    yield pipe, theirs
    pipe.close()
    theirs.close()


def received(pipe):
    """The next message, however many reads it takes."""
    deadline = time.monotonic() + 10
    while (message := pipe.receive()) is None and time.monotonic() < deadline:
        time.sleep(0.001)
    return message


@pytest.mark.parametrize("size", [0, 1, 16_000, 17_000, 1 << 20, 30_000_000])
def test_a_message_of_any_size_arrives_in_both_directions(ends, size):
    pipe, rank = ends
    thread = threading.Thread(target=lambda: rank.send(("echo", rank.recv_bytes())))
    thread.start()
    pipe.send_bytes(data := os.urandom(size))
    while pipe.has_unsent:
        pipe.flush()
    assert received(pipe) == ("echo", data)
    thread.join()


def test_messages_keep_their_order(ends):
    pipe, rank = ends
    for number in range(5):
        rank.send((number, b"x" * 10_000))
        pipe.send(number)
    assert [received(pipe)[0] for _ in range(5)] == list(range(5))
    assert [rank.recv() for _ in range(5)] == list(range(5))


def test_a_size_of_over_2_gib_is_written_as_a_connection_does(ends):
    pipe, rank = ends

    class Huge(bytes):
        def __len__(self):
            return 2**31

    pipe.send_bytes(Huge(b"x"))
    assert os.read(rank.fileno(), 13) == struct.pack("!iQ", -1, 2**31) + b"x"


def test_a_size_of_over_2_gib_is_understood(ends):
    pipe, rank = ends
    os.write(rank.fileno(), struct.pack("!iQ", -1, 3) + b"K\x07.")  # the pickle of 7
    assert pipe.receive() == 7


def test_half_a_message_makes_nobody_wait(ends):
    pipe, rank = ends
    os.write(rank.fileno(), struct.pack("!i", 1000) + b"half")
    began = time.monotonic()
    assert pipe.receive() is None and pipe.receive() is None
    assert time.monotonic() - began < 5


def test_a_rank_that_reads_nothing_makes_nobody_wait(ends):
    pipe, rank = ends
    pipe.send_bytes(bytes(10_000_000))
    for _ in range(1000):
        pipe.send("where")
    assert pipe.has_unsent


@pytest.mark.parametrize("written", [b"", struct.pack("!i", 1000), struct.pack("!i", 1000) + b"x"])
def test_the_end_is_an_error_also_inside_a_message(ends, written):
    pipe, rank = ends
    os.write(rank.fileno(), written)
    rank.close()
    with pytest.raises((EOFError, OSError)):
        pipe.receive()


def test_what_is_for_an_ended_rank_is_dropped(ends):
    pipe, rank = ends
    pipe.send_bytes(bytes(10_000_000))
    rank.close()
    pipe.flush()
    assert not pipe.has_unsent
    pipe.send("where")
    assert not pipe.has_unsent
