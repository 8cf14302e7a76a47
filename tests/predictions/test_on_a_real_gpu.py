"""What was predicted, against what an H200 has measured: experiments/reference/h200."""

import copy
import json
from pathlib import Path

from _bench import memory, memory_cases
from _on_gpu import one_rank

from labs.predictions import hardware
from labs.predictions.memory.predict import HELD_TO, predict
from labs.predictions.plans.intervals import COUNTED
from labs.training.memory_categories import GiB

FOLDER = Path(__file__).resolve().parents[2] / "experiments/reference/h200"
ROWS = json.loads((FOLDER / "bench_memory.json").read_text())["runs"]
BENCH = {row["case"]: row["measured_bytes"] for row in ROWS}
ONE_RANK = json.loads((FOLDER / "one_rank.json").read_text())
MEASURED = {row["case"]: row["measured_bytes"] for row in ONE_RANK["rows"]}


def off(case, config, measured, **options) -> float:
    """By what share of what was measured the recording's prediction is off."""
    found = predict(config, batch=case.batch, sequence=case.sequence, strategy=case.strategy,
                    recipe=memory.RECIPES[case.precision], checkpointing=case.checkpointing,
                    device="cuda", inputs=True, **options)["peak"].total
    return (found + ONE_RANK["workspace_bytes"]) / measured - 1


def test_every_job_is_predicted():
    """Among them grouped keys in fp32, which no kernel of a GPU fuses; 1B, 7B and 8B."""
    found = {case.name: off(case, case.config, BENCH[case.name], ranks=case.ranks,
                            reshard=case.reshard, bucket_view=case.view)
             for case in memory_cases.grid(large=True) if case.name in BENCH}
    for case in one_rank.CASES:
        config = copy.copy(one_rank._config(case.model, small=False))
        config.use_cache = False  # as the job has it
        found[case.name] = off(case, config, MEASURED[case.name], ranks=one_rank.RANKS)
    assert found.keys() == {*BENCH, *MEASURED}
    furthest = min(found.values())
    assert max(map(abs, found.values())) == -furthest, found
    measured_over = [1 / (1 + one) for one in found.values()]
    ends = min(measured_over), max(measured_over)
    assert (COUNTED.low, COUNTED.high) == tuple(round(end, 3) for end in ends)
    assert COUNTED.rows == len(found)
    assert HELD_TO == (f"{len(found)} jobs on an H200 allocated at most {-100 * furthest:.1f} % "
                       "more than predicted")


def test_what_the_notebook_says_of_it():
    """01 and the folder's README: what is reserved, and what the process takes beside that."""
    shares = [row["reserved"] / row["measured_bytes"] for row in ONE_RANK["rows"]]
    assert round(min(shares), 2) == 1.08 and round(max(shares), 2) == 1.4
    beside = [(row["driver"] - row["reserved"]) / GiB for row in ONE_RANK["rows"]]
    assert (round(min(beside), 2), round(max(beside), 2)) == (0.73, 0.82)
    named = hardware.overheads()
    assert min(beside) < (named["CUDA context"] + named["loaded kernels"]) / GiB < max(beside)
    [row] = [row for row in ROWS if row["case"] == "Llama odd fsdp2-8 4x512 fp32"]
    assert round(row["off_pct"]["recording"]) == -23  # as it was predicted then
