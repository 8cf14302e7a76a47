"""How many cores a launch may use, on a machine that a class shares: read, not timed."""

import os

import pytest

from labs.workers import cores, devices


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A function that sets what the system says: cores, files of control groups, JupyterHub's."""
    def put(allowed=16, own="", hub=None, **groups):
        (tmp_path / "own").write_text(own)
        for path, text in groups.items():
            file = tmp_path / "cgroup" / path.replace("__", "/").replace("cpu_", "cpu.")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text + "\n")
        monkeypatch.setattr(cores, "CGROUP", tmp_path / "cgroup")
        monkeypatch.setattr(cores, "OWN_GROUPS", tmp_path / "own")
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(allowed)), raising=False)
        monkeypatch.delenv(cores.HUB_LIMIT, raising=False)
        if hub is not None:
            monkeypatch.setenv(cores.HUB_LIMIT, hub)
        return cores.available()
    return put


def test_without_limits_all_cores_that_the_process_may_run_on(machine):
    assert machine(allowed=6) == 6 and cores.quota() is None
    assert machine(allowed=6, cpu_max="max 100000") == 6


@pytest.mark.parametrize(("quota", "found"), [("400000 100000", 4), ("250000 100000", 2),
                                              ("50000 100000", 1), ("9900000 100000", 16)])
def test_a_containers_quota(machine, quota, found):
    assert machine(cpu_max=quota) == found


def test_a_students_group_on_a_host_and_those_above_it(machine):
    """As systemd makes them for each user; the least of them counts."""
    own = "1:name=systemd:/x\n0::/user.slice/user-7.slice/hub.service\n"
    assert machine(own=own, **{"user.slice__cpu_max": "800000 100000",
                               "user.slice__user-7.slice__hub.service__cpu_max": "300000 100000"
                               }) == 3
    assert machine(own=own, **{"user.slice__cpu_max": "200000 100000"}) == 2


def test_version_1(machine):
    own = "4:memory:/x\n2:cpu,cpuacct:/student\n"
    files = {"cpu__student__cpu_cfs_quota_us": "500000", "cpu__cpu_cfs_quota_us": "-1",
             "cpu__student__cpu_cfs_period_us": "100000", "cpu__cpu_cfs_period_us": "100000"}
    assert machine(own=own, **files) == 5


@pytest.mark.parametrize(("hub", "found"), [("2.0", 2), ("0.5", 1), ("64", 16), ("", 16),
                                            ("None", 16), ("0", 16)])
def test_a_hubs_limit_counts_also_where_nothing_enforces_it(machine, hub, found):
    assert machine(hub=hub) == found


def test_ranks_share_the_students_cores(machine):
    machine(allowed=64, hub="8")
    assert devices.plan(4).threads == 2 and devices.plan(2).threads == 4
    machine(allowed=64, hub="2")
    assert devices.default_ranks() == 2 and devices.plan(4).threads == 1
