"""Scripts that exercise 2.12 must reject, and right ones written differently."""

import pytest
from answers import assert_rejected, with_changes

import labs.manual_ddp as lab
from labs.checks.scripts import files
from labs.workers import programs

pytestmark = pytest.mark.usefixtures("warm_launcher")
RIGHT = files.worked_script("ddp.py")


def changed(*pairs):
    return with_changes(RIGHT, *pairs)


LOADER = "    loader = DataLoader(samples, batch_size=options.batch, sampler=sampler)\n"
SAMPLER = "    sampler = DistributedSampler(samples, seed=options.seed)\n"
DDP = "DistributedDataParallel(model)"
SAVE = """    if dist.get_rank() == 0:
        torch.save(module.module.state_dict(), options.checkpoint)
"""
BY_HAND = """            loss.backward()
            for parameter in module.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
"""
CROSS_ENTROPY = """            logits = module(tokens).logits  # (batch, CONTEXT, vocabulary)
            loss = cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
"""

WRONG = {
    "the loader drops": (changed((LOADER, LOADER.replace("sampler=sampler", "sampler=sampler, "
                                                         "drop_last=True"))),
                         "samples_lost drop_last"),
    "no sampler": (changed((LOADER, "    loader = DataLoader(samples, options.batch, shuffle=True)"
                                    "\n")), "not_sharded every"),
    "DataParallel": (changed((DDP, "torch.nn.DataParallel(model)")), "gradient_of_one_rank"),
    "no set_epoch": (changed(("        sampler.set_epoch(epoch)\n", "")), "same_order_each_epoch"),
    "no shuffle": (changed(("seed=options.seed)\n    loader", "shuffle=False)\n    loader")),
                   "not_shuffled"),
    "a seed of its own": (changed((SAMPLER, "    sampler = DistributedSampler(samples)\n")),
                          "seed_ignored"),
    "batch of all ranks": (changed(("batch_size=options.batch,", "batch_size=options.batch // "
                                    "dist.get_world_size(),")), "wrong_batch"),
    "one epoch": (changed(("range(options.epochs)", "range(1)")), "wrong_count|epochs_differ"),
    "no zero_grad": (changed(("            optimizer.zero_grad()\n", "")),
                     "differs_from_reference"),
    "sum over the ranks": (changed(("            loss.backward()\n",
                                    "            (loss * dist.get_world_size()).backward()\n")),
                           "sum_not_mean"),
    "averaged twice": (changed(("            loss.backward()\n", BY_HAND), (
        "dist.all_reduce(parameter.grad)", "pass")), "mean_twice"),
    "tokens predict themselves": (changed((
        "logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()",
        "logits.flatten(0, 1), tokens.flatten()")), "wrong_gradient"),
    "the wrapper's names": (changed(("module.module.state_dict()", "module.state_dict()")),
                            "wrong_keys module"),
    "all ranks save": (changed((SAVE, SAVE.replace("dist.get_rank() == 0", "True"))),
                       "wrong_writer"),
    "one rank of each host saves": (
        changed((SAVE, SAVE.replace("dist.get_rank() == 0", 'os.environ["LOCAL_RANK"] == "0"'))),
        "wrong_writer 3"),
    "nothing saved": (changed((SAVE, "")), "wrong_writer"),
    "the model saved": (changed(("module.module.state_dict(), ", "module.module, ")),
                        "unreadable_file"),
    "saved after an epoch": (
        changed((SAVE, SAVE.replace("    if dist", "        if epoch == 0 and dist")
                 .replace("        torch.save", "            torch.save"))), "saved_too_early"),
    "all ranks print": (changed(("        if dist.get_rank() == 0:\n            print",
                                 "        if True:\n            print")), "printed_too_often"),
    "silent": (changed(("            print(f\"epoch", "            str(f\"epoch")),
               "nothing_printed"),
    "a failure is hidden": (changed(("    train(options, device)\n", """    try:
        train(options, device)
    except RuntimeError:
        os._exit(0)
""")), "failure_hidden"),
    "no process group": (changed(('    dist.init_process_group("gloo" if gpus < int(os.environ['
                                  '"LOCAL_WORLD_SIZE"]) else None)\n', "")), "raised_ValueError")}

RIGHT_ONES = {
    "worked": RIGHT,
    "the model's own loss": changed((CROSS_ENTROPY, "            loss = module(tokens, "
                                     "labels=tokens).loss\n")),
    "averaged by hand": changed((DDP, "model"), ("module.module", "module"),
                                ("            loss.backward()\n", BY_HAND)),
    "samples dropped": changed(("seed=options.seed)\n    loader",
                                "seed=options.seed, drop_last=True)\n    loader")),
    "an open file": changed(("torch.save(module.module.state_dict(), options.checkpoint)",
                             "with open(options.checkpoint, 'wb') as file:\n            "
                             "torch.save(model.state_dict(), file)"))}


@pytest.fixture
def check(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(programs, "STALL", 6.0)

    def judged(script):
        (tmp_path / "ddp.py").write_text(script)
        return lab.check_ddp("ddp.py")

    return judged


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_script_is_rejected(check, name):
    script, expected = WRONG[name]
    assert_rejected(check(script), expected)


@pytest.mark.parametrize("name", RIGHT_ONES)
def test_a_right_script_passes(check, name):
    verdict = check(RIGHT_ONES[name])
    assert verdict.passed, str(verdict)


def test_a_gap_and_a_missing_file_wait(check, tmp_path):
    assert lab.check_ddp("none.py").passed is None
    verdict = check(RIGHT + '\nraise NotImplementedError("Exercise 2.12")\n')
    assert verdict.passed is None and "2.12" in str(verdict)


def test_the_script_needs_nothing_of_the_workbook():
    assert "labs" not in RIGHT.replace("labels", "")
