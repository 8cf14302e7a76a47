"""The table of prices: each with a page and a day, and a student's own over it."""

import json
import re

import pytest

from labs.predictions.cost.prices import MACHINES, hourly, node_dollars, price_table
from labs.predictions.hardware import GPUS


@pytest.mark.parametrize("machine", MACHINES.values(), ids=lambda machine: machine.name)
def test_a_price_has_a_page_and_a_day(machine):
    assert "/" in machine.source and re.fullmatch(r"2026-\d\d-\d\d", machine.read)
    assert machine.transcribed.startswith("github.com/")  # nobody here read a seller's page
    assert machine.gpu in GPUS and machine.gpus in (1, 8)
    assert 0.5 < machine.dollars < 15 and (machine.spot or 0) < machine.dollars


def test_a_node_is_rented_by_the_minute():
    assert node_dollars(60) == pytest.approx(22.32)
    assert node_dollars(30, "Lambda 1x A10") == pytest.approx(0.645)


def test_a_number_replaces_a_price_and_says_whose_it_is():
    found = price_table({"Lambda 1x A10": 0.5})["Lambda 1x A10"]
    assert (found.dollars, found.gpu, found.source, found.read) == (0.5, "A10", "your own", "")
    assert found.transcribed == ""
    assert MACHINES["Lambda 1x A10"].dollars == 1.29


def test_spot_and_on_demand_of_one_offer_are_of_one_region_and_day():
    [machine] = [machine for machine in MACHINES.values() if machine.spot]
    assert (8 * machine.dollars, 8 * machine.spot) == pytest.approx((63.296, 27.1988), rel=1e-3)


def test_a_new_machine_and_a_file(tmp_path):
    rows = {"ours": {"gpu": "A10", "gpus": 2, "dollars": 0.4, "spot": 0.2, "source": "the cellar"}}
    path = tmp_path / "prices.json"
    path.write_text(json.dumps(rows))
    assert price_table(path) == price_table(rows) == MACHINES | {"ours": price_table(rows)["ours"]}
    assert hourly(price_table(str(path))["ours"]) == pytest.approx(0.8)
    assert price_table() == MACHINES


@pytest.mark.parametrize("rows, words", [
    ({"ours": 2}, "'ours' is not in the table of prices: give its gpu and its dollars"),
    ({"ours": {"gpu": "A11", "dollars": 1}}, "no GPU 'A11'"),
    ({"Lambda 1x A10": {"price": 1}}, "has a field that no machine has: choose name, gpu"),
    ({"Lambda 1x A10": 0}, "numbers above 0"), ({"Lambda 1x A10": {"spot": "1"}}, "numbers above")])
def test_a_row_that_cannot_be_read_gets_one_sentence(rows, words):
    with pytest.raises(ValueError, match=words):
        price_table(rows)
