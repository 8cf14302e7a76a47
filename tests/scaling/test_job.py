"""Scripts that exercise 6.15 must reject, and right ones written differently. A wrong script is run
until the first launch that shows what is wrong; the worked script is run by the notebook."""

import pytest
from answers import assert_rejected, with_changes

import labs.scaling as lab
from labs.checks.scripts import files
from labs.workers import programs

pytestmark = pytest.mark.usefixtures("warm_launcher")
RIGHT = files.worked_script("job.py")


def changed(*pairs):
    return with_changes(RIGHT, *pairs)


BLOCKS = "    for block in models.blocks(model):\n        fully_shard(block, mesh=mesh)\n"
ROOT = "    return fully_shard(model, mesh=mesh)\n"
MESH = '    mesh = mesh if replicas > 1 else mesh["shards"]\n'
CLIP = "    norm = torch.nn.utils.clip_grad_norm_(module.parameters(), clip).full_tensor()\n"
NO_CLIP = CLIP.replace("clip)", "float('inf'))")
OWN_NORM = """    own = [p.grad.to_local() for p in module.parameters()]
    norm = sum(g.square().sum() for g in own) ** 0.5
    for g in own:
        g.mul_(min(1, clip / norm))
"""
ALL_NORM = OWN_NORM.replace("    for g", "    norm = norm ** 2\n    dist.all_reduce(norm)\n"
                                        "    norm = norm ** 0.5\n    for g")
TOKENS = "    dist.all_reduce(tokens)\n"
LOSS = "        mine = loss_sum(module, part) / tokens\n"
OF_PART = "        mine = loss_sum(module, part) / count_answers(part) / len(parts)\n"
BACKWARD = "        (mine * dist.get_world_size()).backward()\n"
SAMPLER = "    sampler = DistributedSampler(rows, seed=options.seed)\n"
STEPS = ("            steps.append(train_step(module, optimizer, parts, options.clip))\n")
SWALLOWED = """            try:
                steps.append(train_step(module, optimizer, parts, options.clip))
            except RuntimeError as error:
                print(error)
                os._exit(0)
"""
RETURN = '    return {"loss": loss.item(), "tokens": tokens.item(), "norm": norm.item()}\n'
DDP = "    return torch.nn.parallel.DistributedDataParallel(model)\n"
NO_SYNC = "    module.set_requires_gradient_sync(False)\n    for part in parts:\n"

WRONG = {
    "DDP": (changed((BLOCKS, ""), (ROOT, DDP), ("clip).full_tensor()", "clip)")),
            "not_sharded parameter"),
    "root not sharded": (
        changed((ROOT, "    return model\n"), (CLIP, """    norm = sum(
        p.grad.full_tensor().square().sum() if hasattr(p, "placements") else p.grad.square().sum()
        for p in module.parameters()) ** 0.5
    for p in module.parameters():
        p.grad *= min(1, clip / norm.item())
""")), "partly_sharded"),
    "only the root sharded": (changed((BLOCKS, "")), "one_unit"),
    "each rank clips by its own norm": (changed((CLIP, OWN_NORM)),
                                        "wrong_gradient norm"),
    "not clipped": (changed((CLIP, NO_CLIP)), "wrong_gradient reference's"),
    "mean of means": (changed((LOSS, OF_PART), (BACKWARD, "        mine.backward()\n")),
                      "wrong_gradient micro-batches"),
    "tokens of this rank": (changed((TOKENS, ""), (BACKWARD, "        mine.backward()\n")),
                            "wrong_gradient"),
    "a step after each micro-batch": (
        changed(("islice(batches, options.accumulate)", "islice(batches, 1)")),
        "wrong_batch"),
    "no zero_grad": (changed(("    optimizer.zero_grad()\n", "")),
                     "wrong_gradient together"),
    "the same shuffle for each seed": (
        changed((SAMPLER, SAMPLER.replace(", seed=options.seed", ""))), "seed_ignored order"),
    "samples of one seed": (changed(("options.samples, options.seed", "options.samples, 3")),
                            "wrong_inputs|seed_ignored"),
    "a model of one seed": (changed(("options.hidden, seed=options.seed",
                                     "options.hidden, seed=3")),
                            "wrong_gradient"),
    "no sampler": (changed(("options.batch, sampler=sampler", "options.batch, shuffle=True")),
                   "not_sharded samples"),
    "averaged twice": (changed((BACKWARD, "        mine.backward()\n")),
                       "mean_twice"),
    "never synchronized": (changed(("    for part in parts:\n", NO_SYNC),
                                   ("clip).full_tensor()", "clip)")), "gradient_missing"),
    "invented numbers": (
        changed((RETURN, '    return {"loss": 5.0, "tokens": 99, "norm": 1.5}\n')),
        "wrong_number"),
    "rank 0's loss": (changed(("    dist.all_reduce(loss)\n", "")), "wrong_weights"),
    "norm of rank 0's shards": (changed((CLIP, OWN_NORM[:OWN_NORM.index("    for g")]
                                         + CLIP.replace("norm = ", "", 1))),
                                "norm_of_one_rank"),
    "--replicas ignored": (changed(("    shape = replicas,", "    replicas = 1\n    shape = 1,"),
                                   ("() // replicas", "()")), "too_many_shards"),
    "replicas counted twice": (changed((CLIP, ALL_NORM)), "all_ranks_shards"),
    "errors are swallowed": (changed((STEPS, SWALLOWED)), "failure_hidden"),
    "--epochs ignored": (changed(("in range(options.epochs)", "in range(2)")), "wrong_count"),
    "--layers ignored": (changed(("gpt2(options.layers", "gpt2(2")), "wrong_model 3"),
    "another default of --batch": (changed(('"batch": 2', '"batch": 4')),
                                   "wrong_batch without options"),
    "another default of --seed": (changed(('"seed": 0', '"seed": 1')), "wrong_inputs"),
    "another default of --hidden": (changed(('"hidden": 64', '"hidden": 32')), "wrong_model 64"),
    "another default of --clip": (changed(("default=1.0", "default=2.0")),
                                  "wrong_gradient times"),
    "another learning rate": (changed(("lr=1e-3", "lr=2e-3")), "wrong_gradient AdamW"),
    "another default of --metrics": (changed(('default="job.json"', 'default="out.json"')),
                                     "wrong_writer out.json"),
}
BY_HAND = """    own = [p.grad.to_local() for p in module.parameters()]
    norm = sum(g.square().sum() for g in own)
    dist.all_reduce(norm, group=next(module.parameters()).device_mesh.get_group(-1))
    norm = norm.sqrt()
    for g in own:
        g.mul_(torch.clamp(clip / norm, max=1))
"""
RIGHT_ANSWERS = {
    "one reduce-scatter a step, norm by hand": changed(
        ("    for part in parts:\n",
         "    for part in parts:\n        module.set_requires_gradient_sync(part is parts[-1])\n"),
        (CLIP, BY_HAND)),
    "gradients multiplied, own sampler, pathlib": changed(
        (BACKWARD, "        mine.backward()\n"), (CLIP, (
            "    for parameter in module.parameters():\n"
            "        parameter.grad *= dist.get_world_size()\n" + CLIP)), (MESH, ""), (SAMPLER, ""),
        ("        sampler.set_epoch(epoch)\n", (
            "        drawn = torch.Generator()\n"
            "        drawn.manual_seed(1000 * options.seed + epoch)\n"
            "        order = torch.randperm(len(rows), generator=drawn).tolist()\n"
            "        loader = DataLoader(rows, options.batch,\n"
            "            sampler=order[dist.get_rank()::dist.get_world_size()])\n")),
        ("    loader = DataLoader(rows, options.batch, sampler=sampler)\n", ""),
        ("        with open(options.metrics, \"w\") as file:\n            json.dump(",
         "        import pathlib\n        pathlib.Path(options.metrics).write_text(json.dumps("),
        ('"steps": steps}, file)', '"steps": steps}))')),
}


@pytest.fixture
def check(tmp_path, monkeypatch):
    monkeypatch.setattr(programs, "STALL", 4.0)

    def called(text):
        (tmp_path / "job.py").write_text(text)
        return lab.check_job(str(tmp_path / "job.py"))

    return called


@pytest.mark.parametrize("name", WRONG)
def test_wrong_job(check, name):
    text, words = WRONG[name]
    verdict = check(text)
    assert_rejected(verdict, words)


@pytest.mark.parametrize("name", RIGHT_ANSWERS)
def test_right_job(check, name):
    verdict = check(RIGHT_ANSWERS[name])
    assert verdict.passed, verdict


def test_a_job_with_gaps_waits(check, tmp_path):
    gap = changed((SAMPLER, '    raise NotImplementedError("Exercise 6.15")\n'))
    verdict = check(gap)
    assert verdict.passed is None and "waiting for your code" in verdict.sentence
    assert lab.check_job(str(tmp_path / "none.py")).passed is None
