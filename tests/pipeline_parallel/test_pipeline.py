"""Scripts that exercise 7.27 must reject, and right ones written differently."""

import ast
from pathlib import Path

import pytest
from answers import assert_rejected, with_changes

import labs.pipeline_parallel as lab
from labs.checks.scripts import files
from labs.pipeline_parallel import pipeline_layers
from labs.workers import programs

pytestmark = pytest.mark.usefixtures("warm_launcher")
RIGHT = files.worked_script("pipeline.py")


def changed(*pairs):
    return with_changes(RIGHT, *pairs)


MINE = "    mine = names[rank * len(names) // ranks:(rank + 1) * len(names) // ranks]\n"
STEP = "        optimizer.step()\n"
CLEAR = "        optimizer.zero_grad()\n"
MEAN = "torch.stack(of_micro_batches).mean().item()"

WRONG = {
    "all layers everywhere": (changed((MINE, "    mine = names\n")),
                              "raised_RuntimeError|raised_PipeliningShapeError|rank_failed"
                              "|layers_not_partitioned"),
    "all layers on the last rank but one": (
        changed((MINE, "    mine = names[rank:rank + 1] if rank < ranks - 1 else names[rank:]\n")),
        "uneven_stages"),
    "a layer is left out": (
        changed((MINE, MINE.replace("(rank + 1) * len(names) // ranks]",
                                    "(rank + 1) * len(names) // ranks]\n    mine.remove(next("
                                    "iter(set(mine) & {'block_1'}), mine[0])) if 'block_1' in mine "
                                    "else None"))), "layers_not_partitioned block_1"),
    "names of numbers": (changed(("(name, layers[name]) for name in mine",
                                  "(str(names.index(name)), layers[name]) for name in mine")),
                         "wrong_keys are not the names of layers"),
    "GPipe": (changed(("import PipelineStage, Schedule1F1B", "import PipelineStage, ScheduleGPipe"),
                      ("Schedule1F1B(stage", "ScheduleGPipe(stage")), "not_1f1b"),
    "no optimizer step": (changed((STEP, "")), "missing_step"),
    "no zero_grad": (changed((CLEAR, "")), "wrong_loss"),
    "gradients are sums": (changed(("loss_fn=loss_of)", "loss_fn=loss_of, scale_grads=False)")),
                           "wrong_loss"),
    "the last loss": (changed((MEAN, "of_micro_batches[-1].item()")), "wrong_loss"),
    "the sum of the losses": (changed((MEAN, "torch.stack(of_micro_batches).sum().item()")),
                              "wrong_loss sum"),
    "losses of an epoch": (changed(("            losses.append(" + MEAN + ")\n",
                                    "            losses[:] = [" + MEAN + "]\n")), "wrong_count"),
    "one epoch": (changed(("options.epochs * list(batches)", "list(batches)")), "wrong_count"),
    "one micro-batch": (changed(("Schedule1F1B(stage, options.micro_batches,",
                                 "Schedule1F1B(stage, 1 * dist.get_world_size(),")),
                        "wrong_micro_batches"),
    "the last update is forgotten": (
        changed((STEP, "        if len(losses) < 4:\n    " + STEP)),
        "differs_from_reference|wrong_loss")}

RIGHT_ONES = {
    "worked": RIGHT,
    "the rest on the first ranks": changed((MINE, """    size, more = divmod(len(names), ranks)
    begin = rank * size + min(rank, more)
    mine = names[begin:begin + size + (rank < more)]
""")),
    "one call of step": changed(("""        if rank == 0:
            schedule.step(tokens)
        elif rank < ranks - 1:
            schedule.step()
        else:
            of_micro_batches = []
            schedule.step(target=tokens, losses=of_micro_batches)
            losses.append(torch.stack(of_micro_batches).mean().item())
""", """        found, inputs = [], [tokens] if stage.is_first else []
        schedule.step(*inputs, target=tokens if stage.is_last else None, losses=found)
        if stage.is_last:
            losses.append(sum(loss.item() for loss in found) / len(found))
"""))}


@pytest.fixture
def check(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(programs, "STALL", 6.0)

    def judged(script):
        (tmp_path / "pipeline.py").write_text(script)
        return lab.check_pipeline("pipeline.py")

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
    assert lab.check_pipeline("none.py").passed is None
    verdict = check(RIGHT + '\nraise NotImplementedError("Exercise 7.27")\n')
    assert verdict.passed is None and "7.27" in str(verdict)


def test_the_reference_trains_the_layers_that_the_script_gives():
    worked, ours = (ast.parse(text) for text in (RIGHT, Path(
        pipeline_layers.__file__).read_text(encoding="utf-8")))
    given = {node.name: ast.unparse(node) for node in worked.body if hasattr(node, "name")}
    mine = {node.name: ast.unparse(node) for node in ours.body if hasattr(node, "name")}
    assert mine.keys() == {"Embedding", "Block", "make_layers", "loss_of"}
    assert all(given[name] == text for name, text in mine.items())
    assert any(ast.unparse(node) == "CONTEXT, HIDDEN = (64, 64)" for node in worked.body)
