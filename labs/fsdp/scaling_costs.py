"""Exercise 4.11: what scaling costs: efficiency, the ratio of communication to computing, and the
seconds of CPU offload; and what these formulas say of the billion-parameter lab's jobs."""

from collections.abc import Callable, Sequence

from labs.checks.generator import new_generator
from labs.checks.numbers import (
    Mistake,
    as_list,
    as_number,
    common_cause,
    judge_number,
    number_or_none,
    require_number,
    require_numbers,
    require_signature,
)
from labs.checks.verdicts import check, shows
from labs.pictures.tables import Table
from labs.predictions.step_time.constants import HOST_OPTIMIZER_BYTES

OFFLOAD = ("seconds of copies", "seconds of AdamW")
# (GPUs, tokens of a step on all of them, seconds of the step), on few GPUs and on many. As many
# tokens on each GPU; the same from 2 GPUs; as many tokens in all; more on each of many.
STEPS = (((1, 4096, 0.4), (8, 32768, 0.5)), ((2, 8192, 0.4), (4, 16384, 0.48)),
         ((1, 32768, 3.2), (8, 32768, 0.5)), ((2, 8192, 0.4), (16, 131072, 0.9)))
# Ψ, ranks, tokens of each rank, FLOP/s, bytes/s of the link
MACHINES = ((1e9, 8, 4096, 150e12, 240e9), (5e9, 4, 1024, 60e12, 25e9), (2e9, 2, 8192, 400e12, 4e9),
            (1e9, 1, 4096, 150e12, 240e9))
# Ψ, ranks, bytes/s of a rank's PCIe, bytes/s of the host's memory
HOSTS = ((5e9, 8, 25e9, 350e9), (1e9, 2, 12e9, 100e9), (3e9, 4, 50e9, 600e9))


@check("4.11")
def check_scaling_costs(efficiency: Callable, communication_ratio: Callable,
                        offload: Callable) -> str:
    """efficiency(few, many) -> share; communication_ratio(psi, ranks, tokens, flops, link) ->
    ratio; offload(psi, ranks, pcie, host) -> (seconds of copies, seconds of AdamW)."""
    require_signature(efficiency, ("few", "many"))
    require_signature(communication_ratio, ("psi", "ranks", "tokens", "flops", "link"))
    require_signature(offload, ("psi", "ranks", "pcie", "host"))
    steps, machines, hosts = _with_random()
    _judge(efficiency, steps, _right_efficiency, _EFFICIENCY,
           "Tokens per second of one GPU, on many over on few.")
    _judge(communication_ratio, machines, _right_ratio, _RATIO,
           "Seconds of the bytes that a rank sends, over seconds of its FLOPs.")
    for place, host in enumerate(hosts):
        require_numbers(offload(*host), OFFLOAD, _call(offload, host))
        for index, mistakes in enumerate((_COPIES, _ADAMW)):
            _judge_one(lambda *args, i=index: as_list(offload(*args))[i], hosts, place,
                       lambda *args, i=index: _right_offload(*args)[i], mistakes,
                       f"{_call(offload, host)}, {OFFLOAD[index]}", "s",
                       "Bytes of one rank over its PCIe; bytes of all ranks over the one host.")
    return "counts the efficiency, the communication and the offload of any job"


def _with_random() -> tuple[tuple, tuple, tuple]:
    """STEPS, MACHINES and HOSTS, each with a random case at its end."""
    rng = new_generator()
    few, many, tokens = rng.randint(1, 4), rng.randint(5, 64), rng.randrange(1024, 9000)
    step = ((few, few * tokens, rng.uniform(0.2, 0.6)),
            (many, many * rng.randrange(1024, 9000), rng.uniform(0.3, 0.9)))
    psi, ranks = rng.randrange(1, 90) * 1e8, rng.randint(2, 32)
    machine = (psi, ranks, tokens, rng.uniform(5e13, 5e14), rng.uniform(1e10, 4e11))
    host = (psi, ranks, rng.uniform(1e10, 6e10), rng.uniform(1e11, 6e11))
    return (*STEPS, step), (*MACHINES, machine), (*HOSTS, host)


def _judge(function, cases, right, mistakes, hint) -> None:
    for place, case in enumerate(cases):
        _judge_one(function, cases, place, right, mistakes, _call(function, case), "", hint)


def _judge_one(function, cases: Sequence[tuple], place: int, right, mistakes, what, unit, hint):
    """Judges the answer to one case. Of a wrong one, the mistake is named that explains all."""
    got, want = function(*cases[place]), right(*cases[place])
    answers = [number_or_none(lambda case=case: function(*case)) for case in cases]
    causes = [] if as_number(got) == want else common_cause(mistakes, cases, answers, place)
    judge_number(got, want, causes, what, unit, hint)


def _call(function, case) -> str:
    values = (str(one) if isinstance(one, tuple) else f"{one:g}" for one in case)
    return f"{getattr(function, '__name__', 'it')}({', '.join(values)})"


def _right_efficiency(few, many) -> float:
    return _rate(many) / many[0] / (_rate(few) / few[0])


def _rate(step) -> float:
    return step[1] / step[2]


def _right_ratio(psi, ranks, tokens, flops, link) -> float:
    # Bytes: two gathers and one reduction of 4Ψ each, of which a rank sends (N - 1)/N.
    sends = 3 * 4 * psi * (ranks - 1) / ranks
    # 6 FLOPs for each parameter and token: 2 in forward, 4 in backward.
    return sends / link / (6 * psi * tokens / flops)


def _right_offload(psi, ranks, pcie, host) -> tuple[float, float]:
    # A shard for each of two gathers and its gradient back; AdamW of all ranks' shards on one host.
    return 3 * 4 * psi / ranks / pcie, HOST_OPTIMIZER_BYTES * psi / host


def _of(count) -> Callable[[tuple], float]:
    """A mistake's function of a case, from one of the case's values."""
    return lambda case: count(*case)


def _scaled(right, factor) -> Callable[[tuple], float]:
    """The right number times a factor of the case's values."""
    return lambda case: right(*case) * factor(*case)


_EFFICIENCY: tuple[Mistake, ...] = (
    Mistake("speed_up_all_gpus_together", _of(lambda few, many: _rate(many) / _rate(few)),
            "that is the speed-up of all GPUs together", "Divide each rate by its GPUs."),
    Mistake("few_not_always_one_gpu", _of(lambda few, many: _rate(many) / _rate(few) / many[0]),
            "the few are not always one GPU", "Divide each rate by its own GPUs."),
    Mistake("two_steps_may_different_numbers", _of(lambda few, many: few[2] / many[2]),
            "the two steps may have different numbers of tokens on a GPU",
            "Count tokens per second, not seconds."),
    Mistake("how_much_longer_step_takes", _of(lambda few, many: many[2] / few[2]),
            "that is how much longer a step takes, and the two steps may differ in tokens",
            "Count tokens per second, not seconds."),
    Mistake("upside_down", _of(lambda few, many: 1 / _right_efficiency(few, many)),
            "that is upside down", "Efficiency is below 1 where scaling costs something."),
    Mistake("in_percent", _of(lambda few, many: 100 * _right_efficiency(few, many)),
            "that is in percent", "Return the share: 1 where nothing is lost."))
_RATIO: tuple[Mistake, ...] = (
    Mistake("rank_one_n_parts_already",
            _of(lambda psi, ranks, tokens, flops, link:
                12 * psi / link / (6 * psi * tokens / flops)),
            "a rank has one of N parts already, and sends the rest",
            "A factor (N − 1)/N is missing."),
    Mistake("ddp_bytes", _scaled(_right_ratio, lambda *_: 2 / 3),
            "these are DDP's bytes; FSDP gathers the parameters twice and reduces the gradients",
            "Three collectives of 4Ψ bytes each."),
    Mistake("one_collective_three", _scaled(_right_ratio, lambda *_: 1 / 3),
            "that is one collective of three", "Two gathers and one reduction, 4Ψ bytes each."),
    Mistake("in_fp32_parameter_4_bytes", _scaled(_right_ratio, lambda *_: 1 / 4),
            "in fp32 a parameter has 4 bytes", ""),
    Mistake("computing_one_rank", _scaled(_right_ratio, lambda psi, ranks, *_: 1 / ranks),
            "computing is one rank's, on its own tokens", "All ranks compute at the same time."),
    Mistake("forward_computing_alone", _scaled(_right_ratio, lambda *_: 3),
            "that is forward's computing alone",
            "6 FLOPs for each parameter and token: 2 forward, 4 backward."),
    Mistake("upside_down", lambda case: 1 / _right_ratio(*case) if case[1] > 1 else 0.0,
            "that is upside down", "Communication over computing."))
_COPIES: tuple[Mistake, ...] = (
    Mistake("rank_copies_shard", lambda case: 12 * case[0] / case[2],
            "a rank copies its shard, not the model", "Ψ/N parameters."),
    Mistake("two_copies_shard", lambda case: 8 * case[0] / case[1] / case[2],
            "that is two copies of the shard; there are three",
            "One before each of two gathers, and the gradient's."),
    Mistake("one_copy_shard", lambda case: 4 * case[0] / case[1] / case[2],
            "that is one copy of the shard; there are three",
            "One before each of two gathers, and the gradient's."),
    Mistake("copies_pass_pcie", lambda case: 12 * case[0] / case[1] / case[3],
            "copies pass PCIe, which is slower than the host's memory", ""),
    Mistake("in_fp32_parameter_4_bytes", lambda case: 3 * case[0] / case[1] / case[2],
            "in fp32 a parameter has 4 bytes", ""))
_ADAMW: tuple[Mistake, ...] = (
    Mistake("own_host_bandwidth",
            lambda case: HOST_OPTIMIZER_BYTES * case[0] / case[1] / case[3],
            "all ranks of the node share the host's memory",
            "The host updates all Ψ parameters, on whichever rank their shards are."),
    Mistake("fused_adamw_bytes", lambda case: 28 * case[0] / case[3],
            "28 bytes is AdamW in one fused pass; here each of its operations reads and writes "
            "memory", "The text gives the bytes."),
    Mistake("resident_bytes", lambda case: 16 * case[0] / case[3],
            "16 bytes is what a parameter occupies, not what an update moves",
            "The text gives the bytes."),
    Mistake("resident_bytes_of_states", lambda case: 12 * case[0] / case[3],
            "12 bytes is what parameter and moments occupy, not what an update moves",
            "The text gives the bytes."),
    Mistake("adamw_runs_on_host", lambda case: HOST_OPTIMIZER_BYTES * case[0] / case[2],
            "AdamW runs on the host: its bytes do not pass PCIe", ""))
# The data sheets' rates of an A100: TF32's FLOP/s, and bytes/s of NVLink and of PCIe 4, each in one
# direction; bytes/s of the memory of the two EPYC sockets of its node.
TF32, NVLINK, PCIE, HOST = 156e12, 300e9, 32e9, 410e9
TOKENS = 4096  # of a rank
ONE_GPU, EIGHT_GPUS = (1, TOKENS, 0.352), (8, 8 * TOKENS, 0.371)  # GPUs, tokens, seconds of a step


@shows("4.11")
def show_scaling_costs(efficiency: Callable, communication_ratio: Callable,
                       offload: Callable) -> Table:
    """Returns a table of the student's three prices, for models of 1.01 and 5.44 billion
    parameters on 8 A100s."""
    left = require_number(efficiency(ONE_GPU, EIGHT_GPUS), "efficiency")
    ratio = require_number(communication_ratio(1.01e9, 8, TOKENS, flops=TF32, link=NVLINK),
                           "communication_ratio")
    copies, adamw = require_numbers(offload(5.44e9, 8, pcie=PCIE, host=HOST),
                                    ("copies", "AdamW"), "offload")
    rows = [("tokens/s of a GPU that are left on 8", f"{left:.1%}"),
            ("FSDP's communication, for each second of computing", f"{ratio:.3f} s"),
            ("CPU offload of the larger model: copies over PCIe", f"{copies:.3f} s"),
            ("… and AdamW on the host", f"{adamw:.3f} s")]
    return Table("Your prices, at the data sheets' rates of an A100 and its host", ("", ""), rows)
