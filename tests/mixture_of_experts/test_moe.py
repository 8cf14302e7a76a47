"""Scripts that exercise 9.10 must reject, and right ones written differently."""

from functools import partial

import pytest
import torch
from answers import assert_rejected, with_changes

import labs.mixture_of_experts as lab
from labs.checks.scripts import files
from labs.checks.scripts.expected_training import train_on
from labs.mixture_of_experts import moe
from labs.workers import programs
from labs.workers.launcher import launch

pytestmark = pytest.mark.usefixtures("warm_launcher")
RIGHT = files.worked_script("moe.py")


def changed(*pairs):
    return with_changes(RIGHT, *pairs)


PART = ".chunk(group.size())[group.rank()]"
OWN = f"{PART}.clone()"
COUNTS = "        dist.all_to_all_single(theirs, counts, group=self.group)\n"
SPLITS = RIGHT[RIGHT.index("        send = counts"):RIGHT.index("        rows = ")]
ROWS = "all_to_all_single_autograd(tokens[order // self.k], receive, send, self.group)"
BACK = "all_to_all_single_autograd(outputs[by_expert.argsort()], send, receive, self.group)"
GROUP = ('mesh["replicate"].get_group() if ".experts." in name else dist.group.WORLD')
REDUCE = "        dist.all_reduce(parameter.grad, group=group)\n"
DIVIDE = "        parameter.grad /= dist.get_world_size()\n"
COMPUTE = RIGHT[RIGHT.index("        theirs = torch.empty_like(counts)\n"):
                RIGHT.index(BACK) + len(BACK) + 1]
AVERAGE = RIGHT[RIGHT.index("    for name, parameter in model.named_parameters():\n        group"):
                RIGHT.index(DIVIDE) + len(DIVIDE)]
STEP = "            average_gradients(model, mesh)\n            optimizer.step()\n"
GATHER = "        dist.all_gather(parts, state[name].contiguous(), group=group)\n"
SAVE = ('    whole = full_state(model, mesh["expert"].get_group())\n'
        "    dist.get_rank() or torch.save(whole, options.checkpoint)\n")
SAVE_ALONE = ('    if dist.get_rank() == 0:\n        whole = full_state(model, mesh["expert"]'
              ".get_group())\n        torch.save(whole, options.checkpoint)\n")
MLP = ("[mlp(*each) for each in zip(\n"
       '            parts, self.experts["gate_up"], self.experts["down"], strict=True)]')

# Every rank has all experts, and computes its own copies with them: right, and nothing is saved.
ALL_HERE = changed((OWN, ""), (COMPUTE, (
    "        parts = tokens[order // self.k].split(counts.tolist())\n"
    f"        back = torch.cat({MLP})\n")), (GROUP, "dist.group.WORLD"))
# Equal splits: torch's default, where a rank sends as many rows to each other one.
EQUAL = ("        ranks = self.group.size()\n"
         "        send = receive = [len(order) // ranks] * ranks\n"
         "        send[-1] += len(order) - sum(send)\n")

WRONG = {
    # The sampler, the files and the job, as in the other scripts.
    "the loader drops": (changed(("sampler=sampler)", "sampler=sampler, drop_last=True)")),
                         "samples_lost drop_last"),
    "the sampler has no ranks": (changed((
        "DistributedSampler(samples, seed", "DistributedSampler(samples, 1, 0, seed")),
        "not_sharded every"),
    "ranks of a group draw the same": (changed((
        "DistributedSampler(samples, seed",
        'DistributedSampler(samples, mesh["replicate"].size(), mesh["replicate"].get_local_rank(), '
        "seed")), "not_sharded|samples_not_partitioned"),
    "no other order in each epoch": (changed(("        sampler.set_epoch(epoch)\n", "")),
                                     "same_order_each_epoch"),
    "all ranks save": (changed(("    dist.get_rank() or torch.save", "    torch.save")),
                       "wrong_writer"),
    "only own experts are saved": (changed((GATHER, ""), (
        "        state[name] = torch.cat(parts)\n", "")), "differs_from_reference experts"),
    "experts are saved in another order": (changed((
        "torch.cat(parts)", "torch.cat(parts[::-1])")), "differs_from_reference experts"),
    "a failure is hidden": (changed((
        "    train(parser.parse_args(), setup())\n",
        "    try:\n        train(parser.parse_args(), setup())\n"
        "    except Exception:\n        os._exit(0)\n")), "failure_hidden|wrong_end"),
    # Which experts a rank has.
    "all experts on every rank": (ALL_HERE, "not_sharded 1/2 of the experts"),
    "views of all experts": (changed((OWN, PART)), "not_sharded a view"),
    "only one matrix is divided": (changed((f"down{OWN}", "down")), "raised_ValueError"),
    "part of another rank": (changed(("[group.rank()]", "[group.size() - 1 - group.rank()]")),
                             "wrong_loss"),
    "the first part on all ranks": (changed(("[group.rank()]", "[0]")), "wrong_loss"),
    "every second expert": (changed((PART, "[group.rank()::group.size()]")), "wrong_loss"),
    # Rows there and back.
    "rows are not sorted again": (changed(("rows[by_expert]", "rows")), "wrong_loss"),
    "outputs return in the order of the experts": (changed((
        "outputs[by_expert.argsort()]", "outputs")), "wrong_loss"),
    "sorted forwards twice": (changed(("outputs[by_expert.argsort()]", "outputs[by_expert]")),
                              "wrong_loss"),
    "rows are not sent back": (changed((BACK, "outputs[by_expert.argsort()]")),
                               "raised_RuntimeError|raised_IndexError"),
    "no row is sent": (changed((COMPUTE, "        back = tokens[order // self.k]\n")),
                       "raised_TypeError through self.experts"),
    "outputs are zeros": (changed((COMPUTE, "        back = 0 * tokens[order // self.k]\n")),
                          "raised_TypeError through self.experts"),
    "weights do not add up to 1": (changed((
        "weights / weights.sum(-1, keepdim=True)", "weights")), "wrong_loss"),
    "no count for the last experts, which get no token": (changed((
        "minlength=self.router.out_features", "")), "rank_failed|raised_RuntimeError"),
    "counts are transposed": (changed(("view(self.group.size(), -1)  # [i, j]",
                                       "view(-1, self.group.size())  # [i, j]")),
                              "rank_failed|raised_RuntimeError|raised_ValueError|wrong_loss"),
    "the experts are no parameters": (changed(("nn.ParameterDict", "dict")),
                                      "gradient_missing an nn.ParameterDict"),
    "the part of a rank of all": (changed(("[group.rank()]", "[dist.get_rank()]")),
                                  "raised_IndexError group.rank()"),
    # what arrives is no number of rows: which error it makes is chance
    "counts are assumed equal": (changed((SPLITS, EQUAL)),
                                 "raised_RuntimeError|raised_IndexError|rank_failed"),
    "its own counts for theirs": (changed((COUNTS, "        theirs.copy_(counts)\n")),
                                  "rank_failed expected size"),
    "gradients of rows stay": (changed((ROWS, f"{ROWS}.detach()")), "wrong_gradient"),
    # Gradients.
    "experts over their replicas only": (changed((DIVIDE, (
        "        parameter.grad /= dist.get_world_size(group)\n"))), "experts_doubled 2 times"),
    "experts over all ranks": (changed((GROUP, "dist.group.WORLD")), "wrong_gradient"),
    "experts not averaged": (changed((REDUCE, (
        '        if ".experts." in name:\n            continue\n' + REDUCE))),
        "experts_doubled|not_divided"),
    "the router is not averaged": (changed((REDUCE, (
        '        if "router" in name:\n            continue\n' + REDUCE))),
        "not_averaged router"),
    "only experts and router": (changed((REDUCE, (
        '        if ".mlp." not in name:\n            continue\n' + REDUCE))), "not_averaged"),
    "nothing is averaged": (changed((AVERAGE, "    pass\n")), "not_averaged"),
    "not divided": (changed((DIVIDE, "")), "not_divided"),
    "divided twice": (changed((DIVIDE, 2 * DIVIDE)), "divided_twice"),
    "over the other dimension": (changed((GROUP, GROUP.replace('"replicate"', '"expert"'))),
                                 "wrong_gradient"),
    "averaged after the step": (changed((STEP, "".join(STEP.splitlines(True)[::-1]))),
                                "not_averaged|experts_doubled|not_divided"),
    "the loss of one rank": (changed(("            loss.backward()\n", (
        "            (loss if dist.get_rank() == 0 else 0 * loss).backward()\n"))),
        "wrong_gradient"),
    "gradients are kept": (changed(("            optimizer.zero_grad()\n", "")),
                           "wrong_gradient"),
    # A rank that leaves a collective out.
    "a rank sends no rows": (changed((
        f"        rows = {ROWS}\n",
        "        if dist.get_rank() == 1:\n            return x\n"
        f"        rows = {ROWS}\n")),
        "rank_failed|never_ends all-to-alls"),
    "rank 0 alone gathers the experts": (changed((SAVE, SAVE_ALONE)),
        "never_ends waited in all_gather at moe.py line"),
    "rank 0 alone gathers, and the others leave": (changed((SAVE, SAVE_ALONE),
        ("    dist.barrier()  #", "    #")), "left_alone had last called all_gather")}

BY_RANK = """\
        ranks, local = self.group.size(), len(counts) // self.group.size()
        of_all = [torch.empty_like(counts) for _ in range(ranks)]
        dist.all_gather(of_all, counts, group=self.group)
        mine = [row.view(ranks, local)[self.group.rank()].tolist() for row in of_all]
        send, receive = counts.view(ranks, local).sum(1).tolist(), [sum(row) for row in mine]
        rows = all_to_all_single_autograd(tokens[order // self.k], receive, send, self.group)
        blocks = rows.split(sum(mine, []))
        computed = {}
        for e in range(local):
            for r in range(ranks):
                computed[r, e] = mlp(blocks[r * local + e], self.experts["gate_up"][e],
                                     self.experts["down"][e])
        ordered = torch.cat([computed[r, e] for r in range(ranks) for e in range(local)])
        back = all_to_all_single_autograd(ordered, send, receive, self.group)
"""
HOOKS = """\
    for name, parameter in model.named_parameters():
        parameter.grad.div_(mesh.size())
    experts = [p for name, p in model.named_parameters() if ".experts." in name]
    others = [p for name, p in model.named_parameters() if ".experts." not in name]
    for group, parameters in ((mesh["replicate"].get_group(), experts), (None, others)):
        flat = torch.cat([p.grad.flatten() for p in parameters])
        dist.all_reduce(flat, group=group)
        for p, part in zip(parameters, flat.split([p.numel() for p in parameters])):
            p.grad = part.view_as(p)
"""
SLICES = """\
        first = group.rank() * (n // group.size())
        self.experts = nn.ParameterDict({
            name: full[first:first + n // group.size()].clone()
            for name, full in (("gate_up", gate_up), ("down", down))})
"""
KEEP = RIGHT[RIGHT.index("        self.experts = nn.ParameterDict({\n"):
             RIGHT.index("    # Exercise 9.10: routes")].rstrip() + "\n"
RIGHT_ONES = {
    "worked": RIGHT,
    "blocks by rank and expert, counts by an all-gather": changed((COMPUTE, BY_RANK)),
    "one all-reduce for each kind": changed((AVERAGE, HOOKS)),
    "slices, and softmax of the chosen logits": changed(
        (KEEP, SLICES), ("self.router(tokens).softmax(-1).topk(self.k)",
                         "self.router(tokens).topk(self.k)"),
        ("(weights / weights.sum(-1, keepdim=True))", "weights.softmax(-1)"))}


@pytest.fixture
def check(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(programs, "STALL", 6.0)

    def judged(script):
        (tmp_path / "moe.py").write_text(script)
        return lab.check_moe("moe.py")

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
    assert lab.check_moe("none.py").passed is None
    verdict = check(RIGHT + '\nraise NotImplementedError("Exercise 9.10")\n')
    assert verdict.passed is None and "9.10" in str(verdict)


def rounded_otherwise(case):
    """The case's model, each parameter off by about a rounding error of fp32."""
    model = moe.make_model(case.chosen, case.experts, case.seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1 + 1e-7 * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("case", moe.CASES, ids=lambda case: case.when)
def test_rounding_does_not_decide_who_passes(case):
    """With one chosen expert its weight is 1 whatever the router says, so the router's gradient is
    rounding alone. AdamW divides it by its own size, and the router takes steps in random
    directions: then tokens go to other experts."""
    batches = [[part] for _ in range(moe.EPOCHS)
               for part in case.rows.split(case.ranks * moe.BATCH)]
    [expected], [other] = (
        launch(train_on, batches, make_model, False, ranks=1, quiet=True) for make_model in
        (partial(moe.make_model, case.chosen, case.experts, case.seed),
         partial(rounded_otherwise, case)))
    for got, want in zip(other.gradients, expected.gradients, strict=True):
        assert all(moe._close(got[name], want[name]) for name in want)
