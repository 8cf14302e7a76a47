"""Part 5 of notebook 06: finetune.py in all ways, and what it was."""

import importlib
import json
import re
import time

import pytest

import labs.scaling as lab
from labs.checks.scripts.commands import CommandResult
from labs.checks.verdicts import Verdict
from labs.scaling import identify_strategy as recorded_jobs
from labs.scaling import started_jobs, synthetic_jobs
from labs.scaling.identify_strategy import copies_of
from labs.training import fine_tuning, hf_configs

STAGES = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")
# what the notebook writes
YAML = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
num_machines: 1
num_processes: 2
mixed_precision: "no"
fsdp_config:
  fsdp_version: 2
"""


def identify_strategy(ranks):
    """The solution of exercise 6.11."""
    if len(ranks) == 1 or ranks[0].reduced < 0.5:
        return "one process" if len(ranks) == 1 else "separate"
    return STAGES[sum(number < (1 + len(ranks)) / 2 for number in copies_of(ranks).values())]


def unfilled(*_):
    raise NotImplementedError("Exercise 6.11")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lab.write_script("finetune.py")
    lab.write_script("train.py")
    (tmp_path / "accelerate.yaml").write_text(YAML)
    return tmp_path


def started(script, *options, ranks=2):
    return started_jobs._forked(script, ranks, [*options, "--samples", 8])


@pytest.mark.slow
def test_what_the_fsdp_script_really_is_on_a_cpu(here):
    started_jobs.labs.launch(started_jobs._nothing, ranks=1, quiet=True, device="cpu")
    found = {options: started("finetune.py", *options)
             for options in ((), ("--cpu",), ("--cpu", "--shard"))}
    assert [identify_strategy(job.ranks) for job in found.values()] == ["separate", "DDP", "ZeRO-3"]
    assert {job.ranks[0].library for job in found.values()} == {
        "DistributedType.NO", "DistributedType.MULTI_CPU"}
    # the same numbers, whether or not they are sharded; alone a rank takes twice as many steps
    assert found["--cpu",].losses == pytest.approx(found["--cpu", "--shard"].losses, abs=1e-3)
    assert [len(job.losses) for job in found.values()] == [4, 2, 2]
    table = lab.show_jobs({" ".join(options): job for options, job in found.items()},
                          identify_strategy)
    assert table.rows[2] == ("--cpu --shard", "MULTI_CPU", "ZeRO-3", "2", "1", "1", "1", "1")
    assert [row[2] for row in table.rows] == ["separate", "DDP", "ZeRO-3"]
    assert lab.show_jobs({"": found[()]}, unfilled).passed is None


def test_a_job_on_the_cpu_of_a_node_with_gpus_trains_the_small_model(monkeypatch):
    monkeypatch.setattr(fine_tuning.devices, "gpus", lambda: 8)
    found = fine_tuning.load(None, 2, "cpu")[0].config
    assert (found.num_hidden_layers, found.hidden_size) == fine_tuning._SIZES["cpu"]


def test_a_file_of_another_script_is_said(here):
    run = CommandResult(("accelerate", "launch"), 0, 1.0, "", time.time())
    (here / "finetune.json").write_text('{"ranks": 2, "steps": []}')
    verdict = lab.finetune_jobs(run)
    assert verdict.passed is False and "finetune.json has no list \"ranks\"" in str(verdict)
    assert lab.finetune_jobs(verdict) is verdict


@pytest.mark.slow
def test_train_py_starts_unchanged_by_accelerate(here, capsys):
    found = lab.accelerate("train.py", "--epochs", 1, "--samples", 8, "--batch", 2, ranks=2)
    assert found.code == 0, found.output
    assert re.fullmatch(r"2 steps on 2 ranks, loss \d\.\d+\n", found.output)
    assert json.loads((here / "metrics.json").read_text())["ranks"] == 2
    assert "$ accelerate launch --config_file accelerate.yaml" in capsys.readouterr().out


def test_a_script_with_a_gap_is_not_started(here):
    (here / "train.py").write_text('raise NotImplementedError("Exercise 6.1")\n')
    found = lab.accelerate("train.py")
    assert isinstance(found, Verdict) and found.passed is None


@pytest.mark.parametrize(("text", "said"), [
    ("import sys; print('out'); sys.exit(3)", "script.py --cpu failed on rank"),
    ("import os, sys; os.environ['RANK'] == '1' and 1 / 0; import time; time.sleep(300)",
     "script.py --cpu failed on rank 1"),
    ("print('out')", "script.py --cpu has written no metrics"),
    ("import sys; open(sys.argv[-1], 'w').write('{}')", 'no list "ranks", list "losses" and float'),
    ("import time; time.sleep(300)", "script.py --cpu was not done after 1 s, and was stopped: "
                                     "rank 0 ")])
def test_a_script_that_fails_otherwise_started_is_said_in_a_sentence(here, monkeypatch, text, said):
    if "not done" in said:
        monkeypatch.setattr(started_jobs, "SECONDS", 0.8)
    monkeypatch.setattr(started_jobs.forked, "GRACE", 0.5)
    (here / "script.py").write_text(text)
    monkeypatch.setattr(started_jobs, "_ways", lambda: {"--cpu": (2, ["--cpu"])})
    run = CommandResult(("accelerate", "launch"), 0, 1.0, "", time.time())
    (here / "finetune.json").write_text('{"ranks": [], "losses": [], "tokens_per_second": 1.0}')
    verdict = lab.finetune_jobs(run, "script.py")
    assert verdict.passed is False and said in str(verdict)
    if "not done" in said:  # the second where it had not begun yet
        assert re.search("rank 0 (was at script.py line 1, in|had called) no collective; rank 1 ",
                         str(verdict))
    if "'out'" in text:
        # The rank that failed first is shown; the job ends the other one, maybe before it prints.
        assert re.search("rank [01] │ out", str(verdict))


def test_the_configuration_of_deepspeed_is_json():
    found = json.loads(lab.show_deepspeed_config(3))
    assert found["zero_optimization"]["stage"] == 3


def test_names_of_classes_and_libraries_say_nothing_in_synthetic_jobs():
    names = {}
    for seed in range(20):
        for _, kind, ranks in synthetic_jobs.jobs(seed):
            names.setdefault(ranks[0].module, set()).add(kind)
            assert identify_strategy(ranks) == kind
    assert all(len(kinds) == len(started_jobs.KINDS) for kinds in names.values())


def test_a_students_change_does_not_reach_the_next_check():
    for _, _, ranks in recorded_jobs.record_jobs():
        ranks[0].held.clear()
    assert all(ranks[0].held for _, _, ranks in recorded_jobs.record_jobs())


def test_the_notebooks_figures():
    """16 bytes for each of 7.6 billion parameters; 69 jobs in the check."""
    parameters = sum(p.numel() for p in hf_configs.on_meta(hf_configs.config("Qwen2-7B"))
                     .parameters())
    assert f"{parameters / 1e9:.1f}" == "7.6" and round(16 * parameters / 1e9) == 122
    assert sum(1 for _ in recorded_jobs.record_jobs()) + sum(1 for _ in synthetic_jobs.jobs()) == 69


def test_the_small_qwen2_has_tied_embeddings():
    model = fine_tuning.qwen2(1, 32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.num_key_value_heads == 2


def test_a_hub_that_does_not_answer_is_said_in_a_sentence(monkeypatch):
    transformers = importlib.import_module("transformers")

    def unreachable(name, **_):
        raise OSError(f"We couldn't connect to the hub to load {name}.\nCheck your network.")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", unreachable)
    with pytest.raises(SystemExit, match="does not give Qwen/Qwen2-0.5B: We couldn't connect"):
        fine_tuning.load("Qwen/Qwen2-0.5B", 4, "cpu")


def test_a_model_of_the_hub_comes_with_its_tokens(monkeypatch):
    transformers = importlib.import_module("transformers")

    def tokenizer(text, return_tensors):
        return {"input_ids": fine_tuning.torch.arange(len(text))[None] % 256}

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda name: tokenizer)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained",
                        lambda name, dtype: fine_tuning.qwen2(1, 32))
    model, sequences = fine_tuning.load("Qwen/Qwen2-0.5B", 4, "cpu")
    assert sequences.shape == (4, fine_tuning.CONTEXT) and not model.config.use_cache
