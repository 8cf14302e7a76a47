"""Scripts that exercise 6.1 must reject, and right ones written differently."""

import pytest
from answers import with_changes

import labs.scaling as lab
from labs.exercises.scripts import files
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
    "no sampler": (changed((LOADER, "    loader = DataLoader(windows, options.batch, shuffle=True)"
                                    "\n")), "every rank draws all 24 samples"),
    "no set_epoch": (changed(NO_EPOCH), "same order in epochs 0 and 1"),
    "model drawn by rank": (
        changed(("seed=options.seed).to", "seed=options.seed + dist.get_rank()).to")),
        "begins with a loss of"),
    "sampler seeded by rank": (
        changed((SAMPLER, SAMPLER.replace("options.seed", "options.seed + dist.get_rank()"))),
        "is drawn by ranks"),
    "loss of rank 0": (changed((REDUCED, "")), "rank 0's own"),
    "sum of the means": (
        changed(("total[0] / total[1]", "dist.get_world_size() * total[0] / total[1]")),
        "the sum over 2 ranks"),
    "scheduler stepped for each rank": (
        changed(("            scheduler.step()\n",
                 "            for _ in range(dist.get_world_size()):\n"
                 "                scheduler.step()\n")), "it falls 2x as fast"),
    "scheduler stepped once an epoch": (
        changed(("            scheduler.step()\n", "        scheduler.step()\n")),
        "not 0.000875: it has not fallen"),
    "no DDP": (changed((DDP, "        module = model\n")), "of the rank's own samples alone"),
    "model called past DDP": (changed(("module(input_ids", "module.module(input_ids")),
                              "of the rank's own samples alone"),
    "sum instead of mean": (
        changed((BACKWARD, "            (loss * dist.get_world_size()).backward()\n")),
        "the sum over the 2 ranks"),
    "averaged twice": (
        changed((BACKWARD, "            (loss / dist.get_world_size()).backward()\n")),
        "averaged twice"),
    "no zero_grad": (changed(("            optimizer.zero_grad()\n", "")),
                     "in step 1 the optimizer got the gradients of this step and of the one "
                     "before"),
    "every rank writes": (changed((RANK_0, "    if True:\n")), "ranks 0 and 1 wrote"),
    "nobody writes": (changed((RANK_0, "    if dist.get_rank() == 9:\n")), "no rank wrote"),
    "every rank prints": (
        changed((RANK_0, "    print(len(steps), 'steps')\n" + RANK_0)), "rank 1 printed too"),
    "errors are swallowed": (changed((TRAIN, SWALLOWED)), "exit code was 0"),
    "strategy ignored": (changed(('if options.strategy == "fsdp"', "if False")),
                         "each rank holds all parameters whole"),
    "one epoch": (changed(("in range(epochs)", "in range(1)")), "are 48"),
    "tokens of one rank": (
        changed(("total[1].item() * windows.shape[1]", "windows.numel()")), "(one rank)"),
    "rate of the next step": (
        changed(("            scheduler.step()\n", ""),
                ("            dist.all_reduce(total)\n",
                 "            dist.all_reduce(total)\n            scheduler.step()\n")),
        "the step was taken with"),
    "unequal shares": (
        changed(("\ndef main():", OWN), (SAMPLER, "    sampler = Slices(windows, options.seed)\n"),
                (PAD, "whole = self.size")), "nothing moved"),
    "an error": (changed(("windows = windows.to(device)", "windows = window.to(device)")),
                 "NameError: name 'window' is not defined"),
    "batch left out": (changed((LOADER, LOADER.replace("options.batch, ", ""))),
                       "step 0: it trains on 1 sample; with --batch 3 it should be 3"),
    "batch of all ranks": (
        changed((LOADER, LOADER.replace("options.batch", "max(1, options.batch // dist."
                                                         "get_world_size())"))),
        "it trains on 1 sample; with --batch 3"),
    "train.py's own batch": (changed((LOADER, LOADER.replace("options.batch", "4"))),
                             "step 0: it trains on 4 samples"),
    "LOCAL_RANK": (changed((RANK_0, '    if int(os.environ["LOCAL_RANK"]) == 0:\n')),
                   "fsdp, 24 samples: ranks 0 and 1 wrote"),
    "a name of its own": (changed(("open(options.metrics", 'open("metrics.json"')),
                          "no rank wrote the file of --metrics"),
    "seconds since the beginning": (changed(("            before = now\n", "")),
                                    "they are not of this step alone"),
    "no seconds": (changed(('"seconds": now - before', '"seconds": 0')),
                   "their forward and backward alone took"),
    "nothing is printed": (changed((PRINT, "")), "did not print the last loss"),
    "the first loss is printed": (changed((PRINT, PRINT.replace("[-1]", "[0]"))),
                                  "the loss of step 0 stands there"),
    "the whole model is one unit": (changed((BLOCKS, "")), "bytes of parameters at once"),
    "a block is left out": (changed((BLOCKS, BLOCKS.replace("(model)", "(model)[:1]"))),
                            "bytes of parameters at once"),
    "no seed": (changed((SAMPLER, SAMPLER.replace(", seed=options.seed", ""))),
                "with --seed 3 and with --seed 5 the samples are drawn in the same order"),
    "not shuffled": (changed((SAMPLER, SAMPLER.replace("seed=options.seed", "shuffle=False"))),
                     "in the order in which they lie"),
    "clipped": (changed((BACKWARD, BACKWARD + CLIP)), "as if clipped to a norm of 0.5"),
    "a tensor in JSON": (changed(("loss.item(), \"learning", "loss, \"learning")),
                         "Tensor is not JSON serializable"),
    "losses are summed": (changed(("total[0] / total[1]", "total[0]")),
                          "the sum over all 6 samples"),
    "not Python": (RIGHT.replace("def main():", "def main("), "SyntaxError"),
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
    assert verdict.passed is False and words in verdict.sentence, verdict


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
