"""Scripts that exercise 7.28 must reject, and right ones written differently."""

import pytest
from answers import assert_rejected, with_changes

import labs.tensor_parallel as lab
from labs.checks.scripts import files
from labs.workers import programs

pytestmark = pytest.mark.usefixtures("warm_launcher")
RIGHT = files.worked_script("tp.py")


def changed(*pairs):
    return with_changes(RIGHT, *pairs)


DATA = "    return DistributedSampler(samples, data.size(), data.get_local_rank(), seed=seed)\n"
SHARD = "        fully_shard(module, mesh=mesh[\"data\"])\n"
HEAD = '        "lm_head": ColwiseParallel(output_layouts=Replicate()),\n'
LAYERS = '        **{f"model.layers.*.{name}": style for name, style in layer.items()}})\n'

WRONG = {
    "the loader drops": (changed(("sampler=sampler)", "sampler=sampler, drop_last=True)")),
                         "samples_lost drop_last"),
    "samples by rank": (changed((DATA, "    return DistributedSampler(samples, seed=seed)\n")),
                        "group_draws_differ"),
    "all draw the same": (changed((DATA, "    return DistributedSampler(samples, 1, 0, seed=seed)"
                                         "\n")), "not_sharded every"),
    "samples by the other dimension": (changed((
        'data = mesh["data"]\n    return', 'data = mesh["tensor"]\n    return')),
        "group_draws_differ"),
    "nothing cut": (changed((LAYERS, "        })\n"), (HEAD, ""), (
        '        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),\n', "")),
        "not_sharded"),
    "layers are whole": (changed((LAYERS, "        })\n")), "not_sharded"),
    "one layer is cut": (changed(("model.layers.*.{name}", "model.layers.0.{name}")),
                         "not_sharded"),
    "the MLP is whole": (changed(('             "mlp.gate_proj": columns, "mlp.up_proj": columns, '
                                  '"mlp.down_proj": rows}\n', "             }\n")), "not_sharded"),
    "replicas are not sharded": (changed(("    for module in [*model.model.layers, model]:\n", ""),
                                         (SHARD, "")), "not_sharded|wrong_writer"),
    "shards over all tensor ranks": (changed((SHARD, SHARD.replace('"data"', '"tensor"'))),
                                     "raised_RuntimeError"),
    "rows first": (changed(("columns, rows = ColwiseParallel(), RowwiseParallel()",
                            "rows, columns = ColwiseParallel(), RowwiseParallel()")),
                   "raised_RuntimeError|raised_ValueError|raised_AssertionError"),
    "logits are cut": (changed((HEAD, '        "lm_head": ColwiseParallel(),\n')),
                       "differs_from_reference|raised_RuntimeError"),
    "all ranks save": (changed(("    dist.get_rank() or torch.save", "    torch.save")),
                       "wrong_writer"),
    "shards are saved": (changed(("options=StateDictOptions(full_state_dict=True)",
                                  "options=StateDictOptions()")),
                         "unreadable_file|raised_RuntimeError|differs_from_reference")}

RIGHT_ONES = {
    "worked": RIGHT,
    "the head's output is gathered by another style": changed(
        (HEAD, '        "lm_head": RowwiseParallel(input_layouts=Replicate()),\n')),
    "layer by layer": changed(
        (LAYERS, "        })\n    for part in model.model.layers:\n"
                 "        parallelize_module(part, mesh[\"tensor\"], layer)\n"))}


@pytest.fixture
def check(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(programs, "STALL", 6.0)

    def judged(script):
        (tmp_path / "tp.py").write_text(script)
        return lab.check_tp("tp.py")

    return judged


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_script_is_rejected(check, name):
    script, expected = WRONG[name]
    assert_rejected(check(script), expected)


@pytest.mark.parametrize("name", RIGHT_ONES)
def test_a_right_script_passes(check, name):
    verdict = check(RIGHT_ONES[name])
    assert verdict.passed, str(verdict)


def test_a_gap_and_a_missing_file_wait(check):
    assert lab.check_tp("none.py").passed is None
    verdict = check(RIGHT + '\nraise NotImplementedError("Exercise 7.28")\n')
    assert verdict.passed is None and "7.28" in str(verdict)
