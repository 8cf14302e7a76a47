"""Scripts that exercise 6.1 must reject, and right ones written differently."""

import pytest
from answers import assert_rejected, with_changes

import labs.scaling as lab
from labs.checks.scripts import files
from labs.workers import programs

pytestmark = pytest.mark.usefixtures("warm_launcher")
RIGHT = files.worked_script("train.py")


def changed(*pairs):
    return with_changes(RIGHT, *pairs)


SAMPLER = "    sampler = DistributedSampler(windows, seed=options.seed)\n"
LOADER = "    loader = DataLoader(windows, options.batch, sampler=sampler)\n"
DDP = "        module = DistributedDataParallel(model)\n"
BACKWARD = "            loss.backward()\n"
RANK_0 = "    if dist.get_rank() == 0:\n"
REDUCED = "            dist.all_reduce(total)\n"
NO_EPOCH = ("        sampler.set_epoch(epoch)\n", "")
OWN = """
class Slices:
    def __init__(self, windows, seed):
        self.size, self.epoch, self.seed = len(windows), 0, seed

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        drawn = torch.Generator().manual_seed(100 * self.seed + self.epoch)
        order = torch.randperm(self.size, generator=drawn).tolist()
        whole = self.size - self.size % dist.get_world_size()
        return iter(order[dist.get_rank():whole:dist.get_world_size()])

    def __len__(self):
        return self.size // dist.get_world_size()


def main():"""
BY_HAND = """            for parameter in module.parameters():
                if parameter.grad is not None and not hasattr(parameter, "placements"):
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= dist.get_world_size()
"""
BLOCKS = """        for block in models.blocks(model):
            fully_shard(block)
"""
CLIP = "            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)\n"
PRINT = ("        print(f\"{len(steps)} steps on {dist.get_world_size()} ranks, loss "
         "{steps[-1]['loss']:.3f}\")\n")
PAD = "whole = self.size - self.size % dist.get_world_size()"
SWALLOWED = """    try:
        steps = train(sampler, loader, module, optimizer, scheduler, device, options.epochs)
    except Exception as error:
        print(error)
        os._exit(0)
"""
TRAIN = "    steps = train(sampler, loader, module, optimizer, scheduler, device, options.epochs)\n"

WRONG = {
    "the loader drops": (changed((LOADER, LOADER.replace("sampler=sampler", "sampler=sampler, "
                                                         "drop_last=True"))),
                         "samples_lost drop_last"),
    "no sampler": (changed((LOADER, "    loader = DataLoader(windows, options.batch, shuffle=True)"
                                    "\n")), "not_sharded every"),
    "no set_epoch": (changed(NO_EPOCH), "same_order_each_epoch"),
    "model drawn by rank": (
        changed(("seed=options.seed).to", "seed=options.seed + dist.get_rank()).to")),
        "other_model"),
    "sampler seeded by rank": (
        changed((SAMPLER, SAMPLER.replace("options.seed", "options.seed + dist.get_rank()"))),
        "samples_not_partitioned"),
    "loss of rank 0": (changed((REDUCED, "")), "wrong_reported_loss 0's"),
    "sum of the means": (
        changed(("total[0] / total[1]", "dist.get_world_size() * total[0] / total[1]")),
        "wrong_reported_loss"),
    "scheduler stepped for each rank": (
        changed(("            scheduler.step()\n",
                 "            for _ in range(dist.get_world_size()):\n"
                 "                scheduler.step()\n")), "wrong_learning_rate falls"),
    "scheduler stepped once an epoch": (
        changed(("            scheduler.step()\n", "        scheduler.step()\n")),
        "wrong_learning_rate fallen"),
    "no DDP": (changed((DDP, "        module = model\n")), "gradient_of_one_rank"),
    "model called past DDP": (changed(("module(input_ids", "module.module(input_ids")),
                              "gradient_of_one_rank"),
    "sum instead of mean": (
        changed((BACKWARD, "            (loss * dist.get_world_size()).backward()\n")),
        "sum_not_mean"),
    "mean_twice": (
        changed((BACKWARD, "            (loss / dist.get_world_size()).backward()\n")),
        "mean_twice"),
    "no zero_grad": (changed(("            optimizer.zero_grad()\n", "")),
                     "wrong_loss"),
    "every rank writes": (changed((RANK_0, "    if True:\n")), "wrong_writer"),
    "nobody writes": (changed((RANK_0, "    if dist.get_rank() == 9:\n")), "wrong_writer"),
    "every rank prints": (
        changed((RANK_0, "    print(len(steps), 'steps')\n" + RANK_0)), "printed_too_often"),
    "errors are swallowed": (changed((TRAIN, SWALLOWED)), "failure_hidden"),
    "strategy ignored": (changed(('if options.strategy == "fsdp"', "if False")),
                         "not_sharded parameters"),
    "one epoch": (changed(("in range(epochs)", "in range(1)")), "wrong_count"),
    "tokens of one rank": (
        changed(("total[1].item() * windows.shape[1]", "windows.numel()")),
            "wrong_reported_tokens"),
    "rate of the next step": (
        changed(("            scheduler.step()\n", ""),
                ("            dist.all_reduce(total)\n",
                 "            dist.all_reduce(total)\n            scheduler.step()\n")),
        "wrong_reported_rate"),
    "unequal shares": (
        changed(("\ndef main():", OWN), (SAMPLER, "    sampler = Slices(windows, options.seed)\n"),
                (PAD, "whole = self.size")), "never_ends"),
    "an error": (changed(("windows = windows.to(device)", "windows = window.to(device)")),
                 "raised_NameError"),
    "batch left out": (changed((LOADER, LOADER.replace("options.batch, ", ""))),
                       "wrong_batch"),
    "batch of all ranks": (
        changed((LOADER, LOADER.replace("options.batch", "max(1, options.batch // dist."
                                                         "get_world_size())"))),
        "wrong_batch"),
    "train.py's own batch": (changed((LOADER, LOADER.replace("options.batch", "4"))),
                             "wrong_batch"),
    "LOCAL_RANK": (changed((RANK_0, '    if int(os.environ["LOCAL_RANK"]) == 0:\n')),
                   "wrong_writer fsdp"),
    "a name of its own": (changed(("open(options.metrics", 'open("metrics.json"')),
                          "wrong_writer"),
    "seconds since the beginning": (changed(("            before = now\n", "")),
                                    "wrong_reported_seconds they"),
    "no seconds": (changed(('"seconds": now - before', '"seconds": 0')),
                   "wrong_reported_seconds backward"),
    "nothing is printed": (changed((PRINT, "")), "nothing_printed"),
    "the first loss is printed": (changed((PRINT, PRINT.replace("[-1]", "[0]"))),
                                  "nothing_printed stands"),
    "the whole model is one unit": (changed((BLOCKS, "")), "one_unit"),
    "a block is left out": (changed((BLOCKS, BLOCKS.replace("(model)", "(model)[:1]"))),
                            "one_unit"),
    "no seed": (changed((SAMPLER, SAMPLER.replace(", seed=options.seed", ""))),
                "seed_ignored"),
    "not shuffled": (changed((SAMPLER, SAMPLER.replace("seed=options.seed", "shuffle=False"))),
                     "not_shuffled"),
    "clipped": (changed((BACKWARD, BACKWARD + CLIP)), "loss_scaled"),
    "a tensor in JSON": (changed(("loss.item(), \"learning", "loss, \"learning")),
                         "raised_TypeError"),
    "losses are summed": (changed(("total[0] / total[1]", "total[0]")),
                          "wrong_reported_loss"),
    "not Python": (RIGHT.replace("def main():", "def main("), "raised_SyntaxError"),
}
# What is measured from forward to step, or rounded, is a step's; so is what is printed.
TIMED = changed(("            windows = windows.to(device)\n",
                 "            windows, before = windows.to(device), time.perf_counter()\n"),
                ("            optimizer.zero_grad()\n",
                 "            now = time.perf_counter()\n            optimizer.zero_grad()\n"),
                ("now, loss, rate = time.perf_counter(), ", "loss, rate = "),
                ("            before = now\n", ""), ("now - before", "round(now - before, 3)"),
                (PRINT, "        print(steps)\n"))
RIGHT_ANSWERS = {
    "as worked": RIGHT,
    "timed from forward to step, all printed": TIMED,
    "own sampler that drops": changed(("\ndef main():", OWN),
                                      (SAMPLER, "    sampler = Slices(windows, options.seed)\n")),
    "all-reduce by hand": changed((DDP, "        module = model\n"),
                                  (BACKWARD, BACKWARD + BY_HAND)),
    "drop_last, workers, pathlib": changed(
        (SAMPLER, SAMPLER.replace("seed=", "drop_last=True, seed=")),
        (LOADER, LOADER.replace("sampler=sampler)", "sampler=sampler, num_workers=1)")),
        ("        with open(options.metrics, \"w\") as file:\n", ""),
        ("            json.dump({\"ranks\": dist.get_world_size(), \"steps\": steps}, file)",
         "        from pathlib import Path\n        Path(options.metrics).write_text("
         "json.dumps({\"ranks\": dist.get_world_size(), \"steps\": steps}))")),
}


@pytest.fixture
def check(tmp_path, monkeypatch):
    monkeypatch.setattr(programs, "STALL", 6.0)

    def called(text):
        (tmp_path / "train.py").write_text(text)
        return lab.check_train(str(tmp_path / "train.py"))

    return called


@pytest.mark.parametrize("name", WRONG)
def test_wrong_train(check, name):
    text, words = WRONG[name]
    verdict = check(text)
    assert_rejected(verdict, words)


@pytest.mark.parametrize("name", RIGHT_ANSWERS)
def test_right_train(check, name):
    verdict = check(RIGHT_ANSWERS[name])
    assert verdict.passed, verdict


def test_a_train_with_gaps_waits(check, tmp_path):
    gap = changed((SAMPLER, '    raise NotImplementedError("Exercise 6.1")\n'))
    verdict = check(gap)
    assert verdict.passed is None and "waiting for your code" in verdict.sentence
    assert lab.check_train(str(tmp_path / "none.py")).passed is None
    assert lab.check_train("").passed is None
