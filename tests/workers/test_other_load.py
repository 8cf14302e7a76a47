"""What other programs use of the machine, named before seconds are measured."""

import os
import subprocess
import sys

import pytest

from labs.workers import cores, other_load

LOOP = "while True: pass"


@pytest.fixture
def sentence(monkeypatch, capsys):
    """What is said where other programs use so many of 8 cores, of which 4 are ours."""
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(cores, "available", lambda: 4)
    monkeypatch.setenv("WORKBOOK_PROGRESS", "")

    def said(others, **options):
        monkeypatch.setattr(other_load, "_next", 0.0)
        monkeypatch.setattr(other_load, "used_by_others", lambda: others)
        other_load.name_load(**options)
        return capsys.readouterr().out

    return said


def test_too_few_free_cores_are_named(sentence):
    assert "other programs use 6.0 of its 8 cores" in sentence(6.0)
    assert "the seconds measured now are too long" in sentence(6.0)
    assert "the seconds that it measures" in sentence(6.0, measured=False)
    assert "8.0 of its 8 cores" in sentence(8.3)


def test_others_that_leave_enough_are_not(sentence):
    """Another user of a large machine takes nothing from us."""
    assert sentence(4.5) == ""


def test_it_is_said_once_and_never_in_outputs_that_are_kept(sentence, monkeypatch, capsys):
    assert sentence(7.0)
    other_load.name_load()
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("WORKBOOK_PROGRESS", "0")
    assert sentence(7.0) == ""


def test_what_processes_of_ours_use_is_not_counted():
    """A loop below this process, which all cores together have worked for, too."""
    import psutil

    own = psutil.Process()
    before = other_load._seconds_of(psutil, own)
    loop = subprocess.Popen([sys.executable, "-c", LOOP])
    try:
        busy, ours = other_load._busy(psutil), other_load._seconds_of(psutil, own)
        assert ours >= before
        while other_load._seconds_of(psutil, own) - ours < 0.5:
            pass
        assert other_load._busy(psutil) - busy > 0.4
    finally:
        loop.kill()
        loop.wait()
