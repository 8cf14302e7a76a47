"""What the check of exercise 9.1 must reject, and what it must accept."""

from fractions import Fraction

import pytest
from _build.definitions import definitions
from answers import assert_rejected, assert_waits, named

import labs.mixture_of_experts as lab
from labs.checks.verdicts import Verdict
from labs.mixture_of_experts import count_parameters as room
from labs.training import hf_configs

right = definitions("09_mixture_of_experts").count_parameters
KNOWN = {"Mixtral-8x7B": (46_702_792_704, 12_879_925_248),
         "Qwen3-30B-A3B": (30_532_122_624, 3_353_032_704),
         "DeepSeek-V3": (671_026_404_352, 37_552_282_624)}


def sizes(model):
    return [(name, parameter.numel()) for name, parameter in model.named_parameters()]


def added(model, of_part, total=None):
    """(total, sum of what of_part(name, count) says)."""
    own = sizes(model)
    return (sum(count for _, count in own) if total is None else total,
            sum(of_part(name, count) for name, count in own))


def table(model, experts, k):
    return {8: KNOWN["Mixtral-8x7B"], 128: KNOWN["Qwen3-30B-A3B"]}.get(
        experts, KNOWN["DeepSeek-V3"])


def of_state(model, experts, k):
    def part(name, tensor):
        return tensor.numel() * k // experts if ".experts." in name else tensor.numel()

    own = model.state_dict().items()
    return (sum(tensor.numel() for _, tensor in own), sum(part(*each) for each in own))


def with_two_names(model, experts, k):
    own = list(model.named_parameters(remove_duplicate=False))
    total, active = right(model, experts, k)
    more = sum(p.numel() for _, p in own) - total
    return total + more, active + more


def trained_only(model, experts, k):
    off = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    total, active = right(model, experts, k)
    return total - off, active - off


def one_layer(model, experts, k):
    total, active = right(model, experts, k)
    chosen = sum(count for name, count in sizes(model) if ".experts." in name)
    layers = len({name.split(".experts.")[0] for name, _ in sizes(model) if ".experts." in name})
    return total, total - chosen + chosen * k // experts // layers


WRONG = named(
    arguments=(lambda model, experts, k: (experts, k), "wrong_number|tensors_counted"),
    zeros=(lambda model, experts, k: (0, 0), "wrong_number"),
    one_number=(lambda model, experts, k: right(model, experts, k)[1], "wrong_count"),
    table=(table, "wrong_number|only_active|experts_left_out"),
    tensors=(lambda model, experts, k: (len(sizes(model)),) * 2, "tensors_counted"),
    swapped=(lambda *given: right(*given)[::-1], "swapped"),
    active_twice=(lambda *given: (right(*given)[1],) * 2, "only_active"),
    all_active=(lambda *given: (right(*given)[0],) * 2, "all_active"),
    share_of_everything=(lambda model, experts, k: added(
        model, lambda name, count: count * k / experts), "share_of_everything"),
    shared_as_chosen=(lambda model, experts, k: added(
        model, lambda name, count: count * k // experts if "experts" in name else count),
        "shared_as_chosen"),
    shared_left_out=(lambda model, experts, k: added(
        model, lambda name, count: (count * k // experts if ".experts." in name else
                                    0 if "shared" in name else count)), "shared_left_out"),
    divided_first=(lambda model, experts, k: added(
        model, lambda name, count: k // experts * count if ".experts." in name else count),
        "divided_first"),
    one_expert=(lambda model, experts, k: right(model, experts, 1), "one_expert"),
    one_layer=(one_layer, "one_layer"),
    buffers=(of_state, "buffers_counted"),
    two_names=(with_two_names, "tied_counted_twice"),
    frozen=(trained_only, "frozen_left_out"),
    twice=(lambda model, experts, k: added(
        model, lambda name, count: 2 * (count * k // experts) if ".experts." in name else count),
        "twice"),
    only_experts=(lambda model, experts, k: added(
        model, lambda name, count: count * k // experts if ".experts." in name else 0),
        "only_experts"),
    not_chosen=(lambda model, experts, k: right(model, experts, experts - k),
                "experts_not_chosen|wrong_number"),
    # all_active: in transformers 4 the MLP of Mixtral is called block_sparse_moe.
    all_of_the_mlp=(lambda model, experts, k: added(
        model, lambda name, count: count * k // experts if ".mlp." in name else count),
        "wrong_number|router_like_experts|all_active"),
    router_like_experts=(lambda model, experts, k: added(
        model, lambda name, count: (count * k // experts if ".experts." in name
                                    or "mlp.gate.weight" in name else count)),
        "router_like_experts"),
    router_left_out=(lambda model, experts, k: added(
        model, lambda name, count: (count * k // experts if ".experts." in name else
                                    0 if "mlp.gate.weight" in name else count)),
        "router_left_out"),
    rounded_each=(lambda model, experts, k: added(
        model, lambda name, count: count * k // experts if ".experts." in name else count),
        "rounded_each"))


@pytest.mark.parametrize("answer, code", WRONG)
def test_wrong_answers(answer, code):
    assert_rejected(lab.check_count_parameters(answer), code)


def test_a_cause_is_said_once():
    """Also where it leads to the same number with and without rounding."""
    verdict = lab.check_count_parameters(lambda model, experts, k: added(
        model, lambda name, count: count * k / experts if "experts" in name else count))
    assert verdict.sentence.count("shared experts are counted") == 1, verdict


def by_module(model, experts, k):
    """Of modules in place of names."""
    total = sum(p.numel() for p in model.parameters())
    chosen = sum(p.numel() for name, module in model.named_modules()
                 if name.endswith(".experts") for p in module.parameters())
    return total, float(total - Fraction(experts - k, experts) * chosen)


def less_what_is_not_used(model, experts, k):
    unused = sum(count for name, count in sizes(model) if ".experts." in name)
    total = sum(count for _, count in sizes(model))
    return [total, total - unused * (experts - k) // experts]


def with_split_names(model, experts, k):
    return added(model, lambda name, count: (
        Fraction(count * k, experts) if "experts" in name.split(".") else count))


@pytest.mark.parametrize("answer", [right, by_module, less_what_is_not_used, with_split_names])
def test_right_answers(answer):
    for _ in range(3):
        verdict = lab.check_count_parameters(answer)
        assert verdict.passed, verdict
        assert not any(character.isdigit() for character in verdict.sentence.replace(
            ", ".join(KNOWN), ""))


def test_an_unfilled_gap_waits():
    assert_waits(lab.check_count_parameters, "9.1")


@pytest.mark.parametrize("name", KNOWN)
def test_the_published_models(name):
    case = room._published(name)
    assert (case.total, case.active) == KNOWN[name] == right(case.model, case.experts, case.k)
    assert case.chosen == sum(count for part, count in sizes(case.model) if ".experts." in part)


def test_the_small_models_are_as_they_are_said_to_be():
    for case in room._random_cases(room.new_generator()):
        assert case.total == sum(count for _, count in sizes(case.model))
        assert case.chosen == sum(count for name, count in sizes(case.model)
                                  if ".experts." in name)
        assert case.shared == room._size(case.model, ".shared_experts.")
        assert case.router == room._size(case.model, ".gate.weight")
        assert case.buffers == sum(buffer.numel() for buffer in case.model.buffers())


def test_on_meta_takes_no_memory():
    model = lab.on_meta("Qwen3-30B-A3B")
    assert {p.device.type for p in model.parameters()} == {"meta"}
    with pytest.raises(ValueError, match="no model 'GPT-5'"):
        lab.on_meta("GPT-5")
    assert hf_configs.config("DeepSeek-V3").n_routed_experts == 256


def test_the_picture_says_what_it_shows():
    picture = lab.show_parameters(right)
    words = picture.text
    assert words.startswith("DeepSeek-V3 computes with 5.6 % of its parameters")
    assert "Llama-3-70B: all parameters 70.6 billions; active ones 70.6 billions" in words
    assert "active ones 37.6 billions" in words and "states of training 10.7 TB" in words
    assert "27 % more with 4,096 tokens" in words and "2.5 %, which is looked up" in words
    assert picture.png()


def test_the_picture_of_a_wrong_answer_is_a_verdict():
    found = lab.show_parameters(lambda model, experts, k: None)
    assert isinstance(found, Verdict) and found.passed is False


def test_the_notebooks_numbers():
    total, active = KNOWN["DeepSeek-V3"]
    assert round(100 * active / total, 1) == 5.6 and round(active / 1e9) == 38
    assert round(16 * total / 80e9) == 134 and round(16 * total / 1e12, 1) == 10.7
    assert 0.5 < active / right(lab.on_meta("Llama-3-70B"), 1, 1)[1] < 0.55
    config = hf_configs.config("DeepSeek-V3")
    assert (config.num_hidden_layers - config.first_k_dense_replace, config.num_hidden_layers,
            config.num_experts_per_tok, config.n_shared_experts) == (58, 61, 8, 1)
