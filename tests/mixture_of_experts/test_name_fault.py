"""Exercise 9.5: what its check must reject and accept; what the recorded runs show; the table; and
the picture before it."""

import math
import re

import pytest
from _build.definitions import definitions
from answers import assert_rejected, assert_waits

import labs.mixture_of_experts as lab
from labs.checks import guesses
from labs.mixture_of_experts import name_fault as exercise
from labs.mixture_of_experts.planted_faults import FAULTS, Model, recorded
from labs.mixture_of_experts.reference_parallel import KINDS
from labs.workers import variant

pytestmark = pytest.mark.usefixtures("warm_launcher")
solution = definitions("09_mixture_of_experts").name_fault


def good(pair, far=0.01):
    return abs(pair[0] - 1) < far and pair[1] > 1 - far


class Wrong:
    def nothing(one, three):
        return None

    def the_first(one, three):
        return "experts_doubled"

    def true(one, three):
        return True

    def another_word(one, three):
        return solution(one, three) or "healthy"

    def looks_at_one(one, three):
        return solution(one, one)

    def looks_at_three(one, three):
        return solution(three, three)

    def norms_alone(one, three):
        return solution(*({kind: (ratio, 1.0) for kind, (ratio, _) in digest.items()}
                          for digest in (one, three)))

    def cosines_alone(one, three):
        return solution(*({kind: (1.0 if cosine else 0.0, cosine)
                           for kind, (_, cosine) in digest.items()} for digest in (one, three)))

    def without_rounding(one, three):
        if one["router"][0] == 0:
            return "weights_detached"
        for kind, fault in (("router", "router_partial"), ("experts", "experts_doubled"),
                            ("shared", "shared_twice")):
            if one[kind] != (1, 1):
                return fault
        return None if three["experts"] == (1, 1) else "summed_each_time"

    def a_small_tolerance(one, three):
        """Less than what rounding may change."""
        for kind, fault in (("experts", "experts_doubled"), ("shared", "shared_twice")):
            if not good(one[kind], 2e-4) and one["router"][0] > 0.01:
                return fault
        return solution(one, three)

    def router_last(one, three):
        for kind, fault in (("experts", "experts_doubled"), ("shared", "shared_twice")):
            if not good(one[kind]):
                return fault
        return solution(one, three)

    def factor_2(one, three):
        name = solution(one, three)
        return None if name == "experts_doubled" and abs(one["experts"][0] - 2) > 0.1 else name

    def a_quarter(one, three):
        name = solution(one, three)
        return None if name == "shared_twice" and abs(one["shared"][0] - 0.25) > 0.01 else name

    def partial_is_detached(one, three):
        name = solution(one, three)
        return "weights_detached" if name == "router_partial" else name

    def growth_by_the_cosine(one, three):
        """Micro-batches that are alike leave it at 1."""
        name = solution(one, three)
        return None if name == "summed_each_time" and three["experts"][1] > 0.99 else name

    def changes_its_input(one, three):
        found = solution(one, three)
        one.pop("rest")
        return found

    def takes_one(one):
        return None


WRONG = [
    (Wrong.nothing, "never_named"), (Wrong.the_first, "always_the_same"),
    (Wrong.true, "wrong_type"), (Wrong.another_word, "unknown_name"),
    (Wrong.looks_at_one, "three_ignored"), (Wrong.looks_at_three, "one_ignored"),
    (Wrong.norms_alone, "cosine_ignored"), (Wrong.cosines_alone, "norm_ignored"),
    (Wrong.without_rounding, "rounding_ignored"),
    (Wrong.a_small_tolerance, "healthy_named|wrong_fault"),
    (Wrong.router_last, "router_last"), (Wrong.factor_2, "fault_missed|only_factor_2"),
    (Wrong.a_quarter, "fault_missed"), (Wrong.partial_is_detached, "wrong_fault"),
    (Wrong.growth_by_the_cosine, "fault_missed"),
    (Wrong.changes_its_input, "changes_input"), (Wrong.takes_one, "wrong_signature")]


@pytest.mark.parametrize("answer, expected", WRONG)
def test_a_wrong_answer_is_rejected(answer, expected):
    assert_rejected(lab.check_name_fault(answer), expected)


class Right:
    def by_distance(one, three):
        """|found - right|² / |right|² = ratio² - 2 · ratio · cosine + 1, for each kind."""
        def far(digest, kind):
            ratio, cosine = digest[kind]
            return math.sqrt(max(0, ratio ** 2 - 2 * ratio * cosine + 1))

        if far(one, "router") > 0.3:
            return "router_partial" if one["router"][0] else "weights_detached"
        names = {"experts_doubled": far(one, "experts"), "shared_twice": far(one, "shared"),
                 "summed_each_time": far(three, "experts")}
        return next((name for name, distance in names.items() if distance > 0.3), None)

    def by_kind(one, three):
        off = {kind for kind in one if not good(one[kind], 0.04)}
        if "router" in off:
            return "weights_detached" if one["router"] == (0, 0) else "router_partial"
        if off:
            return "shared_twice" if "shared" in off else "experts_doubled"
        return "summed_each_time" if not good(three["experts"], 0.04) else None


@pytest.mark.parametrize("answer", [solution, Right.by_distance, Right.by_kind])
def test_a_right_answer_is_accepted(answer):
    for _ in range(10):  # other runs each time
        verdict = lab.check_name_fault(answer)
        assert verdict.passed, str(verdict)


def test_an_unfilled_exercise_waits():
    assert_waits(lab.check_name_fault, "9.5")


# what was really recorded


def runs():
    return recorded(exercise.LAYOUTS, Model(), "cpu")


def test_each_fault_shows_as_the_text_says():
    found = runs()
    assert {run.fault for run in found} == {None, *FAULTS}
    for run in found:
        expert, ranks = run.layout.expert, run.layout.ranks
        for digest in (run.one, run.three):
            off = {kind for kind in KINDS if not good(digest[kind], 1e-3)}
            if run.fault is None:
                assert not off, run
            elif run.fault == "experts_doubled":
                assert off == {"experts"}
                assert digest["experts"] == pytest.approx((expert, 1), rel=1e-3)
            elif run.fault == "router_partial":
                assert off == {"router"} and digest["router"][1] < 0.95
            elif run.fault == "shared_twice":
                assert off == {"shared"}
                assert digest["shared"] == pytest.approx((1 / ranks, 1), rel=1e-3)
            elif run.fault == "weights_detached":
                assert digest["router"] == (0, 0)
                # The others are off by more than rounding, and by far less than a fault of theirs.
                assert len(off) > 1
                assert all(good(digest[kind], 0.03) for kind in set(KINDS) - {"router"})
            elif digest is run.one:
                assert not off, run
            else:
                assert off == {"experts"}
                # 7/3 where the micro-batches' gradients are equal, √7 where nothing is in common
                assert 0.9 * 7 / 3 < digest["experts"][0] < 1.05 * math.sqrt(7)


def test_the_check_records_another_model_than_the_table_shows():
    assert exercise._drawn_model() != Model() and exercise._drawn_model().seed != 0


def test_no_rule_that_names_a_mistake_is_right_of_all_random_cases():
    for _ in range(50):
        exercise.drawn()  # asserts so


# the table


def test_the_table_marks_what_is_off():
    table = lab.show_gradients()
    letters = exercise.shown_runs()
    assert sorted(letters) == list("ABCDE") and {r.fault for r in letters.values()} == set(FAULTS)
    # in another order than the notebook's table
    assert all(run.fault != fault for run, fault in zip(letters.values(), FAULTS, strict=True))
    assert not any(fault in repr(table) + table._repr_html_() for fault in FAULTS)
    for run, one, three in zip(letters.values(), table.rows[::2], table.rows[1::2], strict=True):
        for digest, row in ((run.one, one), (run.three, three)):
            marked = {kind for kind, cell in zip(KINDS, row[2:], strict=True) if "✗" in cell}
            assert marked == {kind for kind in KINDS if not good(digest[kind])}
        assert any("✗" in cell for cell in three)


def test_another_class_has_other_letters(monkeypatch):
    orders = set()
    for name in ("", "spring", "autumn", "evening"):
        monkeypatch.setattr(variant, "seed_of", lambda seed, name=name: f"{name}{seed}")
        orders.add(tuple(run.fault for run in exercise.shown_runs().values()))
    assert len(orders) > 1


# the picture before it


def test_adamw_hides_a_factor_and_sgd_does_not():
    # Wide bounds: the text is the running Python's sources, another one in each version.
    guesses.guess("9.4", "times too large", 4)
    picture = lab.show_adamw_hides_it()
    for name, (least, most) in {"AdamW": (0, 1e-4), "SGD": (0.1, 2)}.items():
        right, doubled = picture.data[name].values()
        assert least <= max(abs(a - b) for a, b in zip(right, doubled, strict=True)) <= most
        assert right[-1] < 0.7 * right[0]  # it trains
    said = str(picture)
    assert re.search(r"by less than 0.0001 with AdamW, by up to [\d.]+ with SGD", said)
    assert "You guessed 4, and it is 2 times too large" in said
    assert "AdamW, right: " in said and "before step 30" in said
