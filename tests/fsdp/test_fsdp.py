"""Scripts that exercise 4.13 must reject, and right ones written differently."""

import pytest
from answers import assert_rejected, with_changes

import labs.fsdp as lab
from labs.checks.scripts import files
from labs.workers import programs

pytestmark = pytest.mark.usefixtures("warm_launcher")
RIGHT = files.worked_script("fsdp.py")


def changed(*pairs):
    return with_changes(RIGHT, *pairs)


BLOCK = "        fully_shard(block, mp_policy=policy)\n"
ROOT = "    return fully_shard(model, mp_policy=policy)\n"
BF16 = "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"
WRAP = "            blocks[number] = block = checkpoint_wrapper(block)\n"
SET = ("    set_state_dict(module, optimizer, model_state_dict=weights, "
       "optim_state_dict=moments)\n")

WRONG = {
    "the loader drops": (changed(("sampler=sampler)", "sampler=sampler, drop_last=True)")),
                         "wrong_count step"),
    "nothing sharded": (changed((BLOCK, ""), (ROOT, "    return model\n")), "gradient_of_one_rank"),
    "one unit": (changed((BLOCK, "")), "one_unit"),
    "a block is left out": (changed((BLOCK, "        if number:\n    " + BLOCK)), "one_unit"),
    "no recomputation": (changed((WRAP, "            pass\n")), "not_recomputed"),
    "the wrapper is dropped": (changed((WRAP, "            checkpoint_wrapper(block)\n")),
                               "not_recomputed"),
    "always recomputed": (changed(("        if options.recompute:\n", "        if True:\n")),
                          "recomputed"),
    "no bf16": (changed(("    if options.bf16:\n", "    if False:\n")), "not_bf16"),
    "bf16 of the blocks alone": (changed((ROOT, "    return fully_shard(model)\n")),
                                 "not_bf16|raised_RuntimeError"),
    "reduced in bf16": (changed((BF16, "MixedPrecisionPolicy(param_dtype=torch.bfloat16)")),
                        "wrong_dtype"),
    "the whole model in bf16": (changed(("    if options.bf16:\n",
                                         "    if options.bf16:\n        model.bfloat16()\n")),
                                "shards_not_fp32|not_bf16"),
    "moments not saved": (changed((', "optimizer": moments, "epochs": epochs}',
                                   ', "epochs": epochs}'),
                                  (', "optimizer": moments, "epochs": 0}',
                                   ', "epochs": 0}')), "not_loaded|wrong_rate"),
    "moments not loaded": (
        changed((SET, "    module.load_state_dict(weights)\n"),
                ('"optimizer": moments, "epochs": 0}', '"epochs": 0}')),
        "wrong_rate"),
    "only the rate is restored": (
        changed((SET, "    module.load_state_dict(weights)\n"
                      "    optimizer.param_groups[0]['lr'] = 1e-3\n"),
                ('"optimizer": moments, "epochs": 0}', '"epochs": 0}')),
        "not_loaded moments"),
    # The dictionaries share the shards' memory, which dcp.load fills; but the rate is a number.
    "loaded in place": (changed((SET, "")), "wrong_rate set_state_dict"),
    "epochs of the folder's name": (changed(
        ('return state["epochs"]', "return int(str(path).split('_')[-1])")), "wrong_count"),
    "epochs forgotten": (changed(('    return state["epochs"]\n', "    return 0\n")),
                         "wrong_count"),
    "nothing saved": (changed(("    dcp.save(", "    str(")), "raised_CheckpointException"
                      "|raised_ValueError|raised_TypeError"),
    "rank 0 alone saves": (changed(("    dcp.save(", "    dist.get_rank() or dcp.save(")),
                           "never_ends|rank_failed")}

RIGHT_ONES = {
    "worked": RIGHT,
    "another order of wrapping": changed(
        (BLOCK, ""), (ROOT, "    for block in blocks:\n        fully_shard(block, "
                      "mp_policy=policy)\n" + ROOT)),
    "epochs as a tensor": changed(('"epochs": epochs}', '"epochs": torch.tensor(epochs)}'),
                                  ('"epochs": 0}', '"epochs": torch.tensor(0)}'),
                                  ('return state["epochs"]', 'return state["epochs"].item()'))}


@pytest.fixture
def check(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(programs, "STALL", 6.0)

    def judged(script):
        (tmp_path / "fsdp.py").write_text(script)
        return lab.check_fsdp("fsdp.py")

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
    assert lab.check_fsdp("none.py").passed is None
    verdict = check(RIGHT + '\nraise NotImplementedError("Exercise 4.13")\n')
    assert verdict.passed is None and "4.13" in str(verdict)
