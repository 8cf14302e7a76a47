"""Scripts that exercise 8.6 must reject, and right ones written differently."""


import pytest
from answers import assert_rejected, with_changes

import labs.surviving_failure as lab
from labs.checks.scripts.files import worked_script
from labs.workers import programs

pytestmark = pytest.mark.usefixtures("warm_launcher")
RIGHT = worked_script("elastic.py")


def changed(*pairs):
    return with_changes(RIGHT, *pairs)


def body(name, lines, text=RIGHT):
    """The script with other lines in place of a function's."""
    head, rest = text.split(f"def {name}(", 1)
    first, rest = rest.split("\n", 1)
    end = rest.index("\n\n\n")
    return f"{head}def {name}({first}\n{lines.rstrip()}{rest[end:]}"


def both(save, resume):
    return body("resume", resume, body("save", save))


RESUME = "    done = resume(module, optimizer, scheduler, options.checkpoints)\n"
BROADCAST = "    dist.broadcast_object_list(newest)\n"
SEED = "        torch.manual_seed(1000 * step + dist.get_rank())  # of dropout: nothing to save\n"
EVERY = "        if (step + 1) % options.every == 0:\n"
SAVE = "            save(step + 1, module, optimizer, scheduler, options.checkpoints)\n"
UNFINISHED = """    dcp.save(state, checkpoint_id=folder / "unfinished")
    if dist.get_rank() == 0:
        os.replace(folder / "unfinished", folder / f"step_{done}")
"""
DIRECT = '    dcp.save(state, checkpoint_id=folder / f"step_{done}")\n'
LOOP = "enumerate(islice(batches, done, options.steps), start=done)"
SET = ("        set_state_dict(module, optimizer, model_state_dict=model, "
       "optim_state_dict=moments)\n")
SCHEDULER = '        scheduler.load_state_dict(state["scheduler"])\n'
STATE = """    state = {"done": done, "model": module.state_dict(),
             "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
"""
LOAD = """        module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
"""
LATEST = f"""    path = folder / "latest.pt"
    if path.exists():
        state = torch.load(path)
{LOAD}        return state["done"]
    return 0
"""
OWN_FILES = STATE + """    rank = dist.get_rank()
    torch.save(state, folder / f"part_{rank}")
    os.replace(folder / f"part_{rank}", folder / f"rank_{rank}_step_{done}.pt")
"""
OWN_NEWEST = f"""    rank = dist.get_rank()
    steps = [int(path.stem.split("_")[-1]) for path in folder.glob(f"rank_{{rank}}_step_*.pt")]
    done = max(steps, default=0)
    if done:
        state = torch.load(folder / f"rank_{{rank}}_step_{{done}}.pt")
{LOAD}    return done
"""
RNG_OF_0 = (changed((SEED, ""))
            .replace('"scheduler": scheduler.state_dict()}',
                     '"scheduler": scheduler.state_dict(), "rng": torch.get_rng_state()}')
            .replace(SCHEDULER, SCHEDULER + '        torch.set_rng_state(state["rng"])\n'))

WRONG = {
    "never loads": (changed((RESUME, "    done = 0\n")), "starts_again"),
    "never saves": (changed((SAVE, "            pass\n")), "nothing_saved"),
    "saves only at the end": (changed((EVERY, "        if step + 1 == options.steps:\n")),
                              "saved_too_seldom"),
    "saves every step": (changed((EVERY, "        if True:\n")), "saved_too_often"),
    "saves before the step": (
        changed((EVERY, "        if step % options.every == 0:\n")),
            "saved_too_seldom|saved_too_often"),
    "all ranks into one file": (
        both(STATE + '    torch.save(state, folder / "latest.pt")\n    dist.barrier()\n', LATEST),
        "same_file"),
    "written over": (
        both(STATE + '    if dist.get_rank() == 0:\n        torch.save(state, folder / "latest.pt")'
             "\n    dist.barrier()\n", LATEST), "raised_RuntimeError while"),
    "written over by DCP": (
        changed((UNFINISHED, '    state["done"] = done\n    dcp.save(state, checkpoint_id=folder / '
                             '"latest")\n'),
                ("    newest = [max((int(path.name[5:]) for path in folder.glob(\"step_*\")), "
                 "default=0)]\n", '    newest = [int((folder / "latest").exists())]\n'),
                ('"scheduler": scheduler.state_dict()}\n        dcp.load(state, '
                 'checkpoint_id=folder / f"step_{newest[0]}")',
                 '"scheduler": scheduler.state_dict(), "done": 0}\n        dcp.load(state, '
                 'checkpoint_id=folder / "latest")'),
                ("    return newest[0]\n", '    return state["done"] if newest[0] else 0\n')),
        "raised_CheckpointException"),
    "half ones are found": (changed((UNFINISHED, DIRECT)), "raised_CheckpointException"),
    "replays the data": (changed((LOOP, "enumerate(islice(batches, options.steps - done), "
                                        "start=done)")),
                         "samples_misplaced"),
    "begins with the second batch": (
        changed((LOOP, "enumerate(islice(batches, done + 1, options.steps + 1), start=done)")),
        "wrong_first_step"),
    "each batch twice": (
        changed((LOOP, "enumerate(islice((rows for rows in islice(batches, done, None) for _ in "
                       "'ab'), options.steps - done), start=done)")),
        "wrong_samples"),
    "numbered anew": (changed(("take_step(step, samples", "take_step(step % 2, samples")),
                      "wrong_steps_noted"),
    "data skipped twice": (changed((LOOP, "enumerate(islice(batches, 2 * done, None), start=done)"),
                                   (EVERY, "        if step + 1 >= options.steps:\n"
                                           "            break\n" + EVERY)),
                           "samples_misplaced|step_left_out"),
    "all steps anew": (changed((LOOP, "enumerate(islice(batches, done, done + options.steps), "
                                      "start=done)")), "wrong_last_step|wrong_steps_noted"),
    "without an end": (changed((LOOP, "enumerate(islice(batches, done, None), start=done)")),
                       "wrong_last_step still"),
    "the old one is removed first": (
        changed((UNFINISHED, """    if dist.get_rank() == 0:
        for old in folder.glob("step_*"):
            shutil.rmtree(old)
""" + UNFINISHED), ("import os\n", "import os\nimport shutil\n")),
        "starts_again"),
    "one step too many": (changed(("    return newest[0]\n",
                                   "    return newest[0] and newest[0] + 1\n")),
                          "step_left_out"),
    "one step twice": (changed((SAVE, SAVE.replace("step + 1", "step")),
                               ("dist.get_rank() == 0:\n        os", "True and dist.get_rank() == 0"
                                ":\n        os")), "step_repeated"),
    "oldest": (changed(("max((int(", "min((int(")), "older_checkpoint"),
    "as text": (changed(('max((int(path.name[5:]) for path in folder.glob("step_*")), default=0)',
                         'int(max((path.name for path in folder.glob("step_*")), '
                         'default="step_0")[5:])')), "older_checkpoint"),
    "each rank its own newest": (changed((BROADCAST, "")),
        "ranks_resume_apart"),
    "files of each rank": (both(OWN_FILES, OWN_NEWEST),
        "ranks_resume_apart|raised_RuntimeError|raised_CheckpointException"),
    "rank 0 alone loads": (
        both(STATE + """    if dist.get_rank() == 0:
        torch.save(state, folder / "part")
        os.replace(folder / "part", folder / "latest.pt")
""", f"""    done = [0]
    if dist.get_rank() == 0 and (folder / "latest.pt").exists():
        state = torch.load(folder / "latest.pt")
{LOAD}        done = [state["done"]]
    dist.broadcast_object_list(done)
    return done[0]
"""), "wrong_learning_rate|parameters_not_loaded"),
    "optimizer forgotten": (
        changed(('"model": model, "optimizer": moments, ', '"model": model, '),
                (SET, "        set_model_state_dict(module, model)\n"),
                ("get_state_dict, set_state_dict", "get_state_dict, set_model_state_dict"),
                (SCHEDULER, SCHEDULER + "        for group, rate in zip(optimizer.param_groups, "
                 "scheduler.get_last_lr()):\n            group['lr'] = rate\n")),
        "optimizer_state_missing"),
    "optimizer's steps forgotten": (
        changed((SCHEDULER, SCHEDULER + """        for state in optimizer.state.values():
            state["step"].zero_()
""")), "optimizer_state_missing"),
    "model forgotten": (changed((SET, SET.replace(
        "model_state_dict=model", "model_state_dict=module.state_dict()"))),
        "raised_RuntimeError|parameters_not_loaded|raised_CheckpointException"),
    "model changed": (
        changed((SCHEDULER, SCHEDULER + "        torch._foreach_mul_([p.detach() for p in "
                                        "module.parameters()], 1.01)\n")),
        "parameters_not_loaded"),
    # killed between the two: the parameters of one step, the rest of another one
    "two files, one after the other": (
        both(STATE + """    if dist.get_rank() == 0:
        torch.save(state.pop("model"), folder / "part")
        os.replace(folder / "part", folder / "model.pt")
        torch.save(state, folder / "part")
        os.replace(folder / "part", folder / "rest.pt")
    dist.barrier()
""", f"""    if (folder / "rest.pt").exists():
        state = {{"model": torch.load(folder / "model.pt"), **torch.load(folder / "rest.pt")}}
{LOAD}        return state["done"]
    return 0
"""), "parameters_not_loaded incomplete"),
    "schedule forgotten": (changed((SCHEDULER, "")), "wrong_learning_rate"),
    "schedule and its rate forgotten": (
        changed((SCHEDULER, ""), (SET, "        rate = optimizer.param_groups[0]['lr']\n" + SET
                                  + "        optimizer.param_groups[0]['lr'] = rate\n")),
        "wrong_learning_rate"),
    "random numbers forgotten": (changed((SEED, "")), "other_random_numbers"),
    "one seed for all steps": (changed((SEED, "        torch.manual_seed(0)\n")),
                               "same_random_numbers"),
    "one seed for each start": (
        changed((SEED, ""), (RESUME, RESUME + "    torch.manual_seed(done)\n")),
        "other_random_numbers"),
    "nothing is trained": (body("train", "    resume(module, optimizer, scheduler, "
                                "options.checkpoints)\n"), "does_not_train"),
    "a collective on rank 0 alone": (
        changed((UNFINISHED, """    if dist.get_rank() == 0:
        dcp.save(state, checkpoint_id=folder / "unfinished")
        os.replace(folder / "unfinished", folder / f"step_{done}")
    dist.barrier()
""")), "never_ends"),
    "ends without a word": (changed((SAVE, "            os._exit(3)\n")),
                            "rank_failed"),
    "an error": (changed((BROADCAST, "    dist.broadcast_objects(newest)\n")),
                 "raised_AttributeError"),
}
RIGHT_ONES = {
    "FSDP": changed(("module = DistributedDataParallel(model.to(device))",
                     "module = torch.distributed.fsdp.fully_shard(model.to(device))"),
                    ("import torch.distributed as dist\n",
                     "import torch.distributed as dist\nimport torch.distributed.fsdp\n")),
    "saved in the background": changed(
        ('    dcp.save(state, checkpoint_id=folder / "unfinished")\n',
         '    dcp.async_save(state, checkpoint_id=folder / "unfinished").result()\n')),
    "one generator for all": RNG_OF_0,  # the model's seed has set it, on all ranks
    "metadata last": changed(
        (UNFINISHED, DIRECT),
        ('folder.glob("step_*")', 'folder.glob("step_*") if (path / ".metadata").exists()')),
    "rank 0 saves all": both(
        STATE + """    if dist.get_rank() == 0:
        torch.save(state, folder / "part")
        os.replace(folder / "part", folder / f"step_{done}")
    dist.barrier()
""", f"""    newest = [max((int(path.name[5:]) for path in folder.glob("step_*")), default=0)]
    dist.broadcast_object_list(newest)
    if newest[0]:
        state = torch.load(folder / f"step_{{newest[0]}}")
{LOAD}    return newest[0]
"""),
    "one name, replaced whole": both(
        STATE + """    if dist.get_rank() == 0:
        torch.save(state, folder / "part")
        os.replace(folder / "part", folder / "latest.pt")
    dist.barrier()
""", LATEST),
    "generators saved": changed(
        (SEED, ""),
        (UNFINISHED, '    torch.save(torch.get_rng_state(), folder / f"random_{dist.get_rank()}_'
                     '{done}")\n' + UNFINISHED),
        (SCHEDULER, SCHEDULER + """        random = folder / f"random_{dist.get_rank()}_{newest[0]}"
        if random.exists():
            torch.set_rng_state(torch.load(random))
""")),
}


def verdict_on(script, folder):
    path = folder / "elastic.py"
    path.write_text(script)
    return lab.check_elastic(str(path))


# Rejected only after several starts, or for what another one here shows as well.
SLOW = {"saves before the step", "written over by DCP", "data skipped twice", "all steps anew",
        "one step twice", "oldest", "as text", "files of each rank", "rank 0 alone loads",
        "optimizer's steps forgotten", "model forgotten", "schedule forgotten", "an error",
        "each rank its own newest", "without an end", "the old one is removed first",
        "a collective on rank 0 alone", "model changed"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW
                                  else name for name in WRONG])
def test_a_wrong_script_is_rejected_for_its_reason(name, tmp_path, monkeypatch):
    monkeypatch.setattr(programs, "STALL", 4.0)
    script, words = WRONG[name]
    verdict = verdict_on(script, tmp_path)
    assert_rejected(verdict, words)


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT_ONES)
def test_a_right_script_passes(name, tmp_path):
    verdict = verdict_on(RIGHT_ONES[name], tmp_path)
    assert verdict.passed, str(verdict)
