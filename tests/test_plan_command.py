"""scripts/plan: what a job will take, asked as a user asks it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from _plan import __main__ as command

from labs.predictions.plans.models import NoModel, shape_named

ROOT = Path(__file__).resolve().parent.parent


def ask(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["plan", *arguments])
    code = command.main()
    return code, *capsys.readouterr()


def test_three_plans_are_proposed_each_with_its_limit_and_its_interval(monkeypatch, capsys):
    code, out, _ = ask(monkeypatch, capsys, "Llama-3-8B", "--gpus", "64xH100")
    assert code == 0
    for number in (1, 2, 3):
        assert f"\n{number}  " in out
    assert out.count("80 % of") == 6 and out.count("what takes most is") == 3
    assert "sequences a step, of all GPUs together (--batch)" in out
    assert "tokens/s" in out and "MFU" in out and "a GPU and hour" in out
    assert all(len(line) <= 100 for line in out.splitlines())


def test_json_has_the_same_answers(monkeypatch, capsys):
    code, out, _ = ask(monkeypatch, capsys, "Llama-3-8B", "--gpus", "64xH100", "--json")
    found = json.loads(out)
    assert code == 0 and len(found["answers"]) == 3
    for answer in found["answers"]:
        seconds, memory = answer["seconds"], answer["memory"]
        assert seconds["low"] < seconds["total"] < seconds["high"]
        assert sum(seconds["causes"].values()) == pytest.approx(seconds["total"])
        assert memory["largest"] == pytest.approx(max(
            sum(parts.values()) for parts in memory["stages"].values()))
        assert answer["fits"] and memory["high"] + memory["cuda_and_nccl"] <= memory["card"]
    totals = [answer["seconds"]["total"] for answer in found["answers"]]
    assert totals == sorted(totals)


def test_sizes_that_are_given_are_kept(monkeypatch, capsys):
    code, out, _ = ask(monkeypatch, capsys, "Llama-3-70B", "--gpus", "512xH100", "--tp", "8",
                       "--pp", "4", "--batch", "1024", "--sequence", "8192", "--json")
    plans = [answer["plan"] for answer in json.loads(out)["answers"]]
    assert code == 0 and plans
    assert all((plan["tensor"], plan["pipeline"]) == (8, 4) for plan in plans)


def test_a_whole_plan_has_one_answer_and_a_command_line(monkeypatch, capsys):
    code, out, _ = ask(monkeypatch, capsys, "GPT-2", "--gpus", "8xA100-80", "--tp", "1",
                       "--micro-batch", "1", "--sharding", "DDP", "--recompute", "none",
                       "--batch", "64", "--sequence", "1024")
    assert code == 0 and "launch-bound" in out
    assert "torchrun --standalone --nproc-per-node 8 solutions/scripts/train.py" in " ".join(
        out.split())


def test_the_command_line_is_one_that_the_script_takes(monkeypatch, capsys):
    _, out, _ = ask(monkeypatch, capsys, "GPT-2", "--gpus", "1xA100-80", "--micro-batch", "1",
                    "--sharding", "DDP", "--recompute", "none", "--batch", "4", "--json")
    line = json.loads(out)["answers"][0]["command"].split()
    script = line.index("solutions/scripts/train.py")
    found = subprocess.run([sys.executable, line[script], "--help"], capture_output=True, text=True)
    given = [word for word in line[script:] if word.startswith("--")]
    assert given and all(word in found.stdout for word in given)


def test_each_stage_of_a_pipeline_is_named_with_its_parts(monkeypatch, capsys):
    code, out, _ = ask(monkeypatch, capsys, "Llama-3-8B", "--gpus", "16xH100", "--tp", "2", "--pp",
                       "4", "--micro-batch", "1", "--sharding", "ZeRO-1", "--recompute", "full",
                       "--code", "nanotron", "--batch", "64", "--stages", "9,8,8,7")
    assert code == 0
    assert [f"stage {stage}" in out for stage in range(4)] == [True] * 4
    assert "nanotron, pipeline, up to 64 GPUs" in out


@pytest.mark.parametrize("arguments, says", [
    (("Llama-9", "--gpus", "8xH100"), "no model 'Llama-9': choose GPT-2"),
    (("GPT-2", "--gpus", "8xH900"), "no GPU 'H900' in the table"),
    (("GPT-2", "--gpus", "8xH100", "--code", "jax"), "no code base 'jax': choose"),
    (("GPT-2", "--gpus", "8xH100", "--recipe", "int4"), "no recipe 'int4'"),
    (("GPT-2", "--gpus", "8xH100", "--tp", "3", "--sharding", "DDP", "--recompute", "none",
      "--micro-batch", "1"), "is 6 GPUs, the job has 8"),
    (("GPT-2", "--gpus", "8xH100", "--tp", "8", "--sharding", "DDP", "--recompute", "none",
      "--micro-batch", "1", "--batch", "8"), "12 query heads cannot be divided by 8"),
    (("GPT-2", "--gpus", "8xH100", "--calibrate", "nothing.json"), "is no measured step such as"),
    (("GPT-2", "--gpus", "1xH100", "--sharding", "DDP", "--recompute", "none", "--micro-batch", "1",
      "--sequence", "2048"), "GPT-2 has learned positions for only 1,024"),
    (("GPT-2", "--gpus", "8xH100", "--ep", "2"), "GPT-2 has no experts to divide over ranks"),
    (("nobody/nothing", "--gpus", "8xH100"), "the hub gave no config.json")])
def test_bad_input_gets_one_sentence(monkeypatch, capsys, tmp_path, arguments, says):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    code, out, err = ask(monkeypatch, capsys, *arguments)
    assert code == 1 and says in err and not out
    assert err.startswith("scripts/plan: ") and err.count("\n") == 1


def test_where_no_plan_fits_it_says_what_to_do(monkeypatch, capsys):
    code, out, _ = ask(monkeypatch, capsys, "Llama-3-70B", "--gpus", "1xT4")
    assert code == 1 and "No plan fits: take more GPUs" in out


@pytest.mark.parametrize("text", ["64H100", "H100", "0xH100", "xH100"])
def test_gpus_are_a_number_and_a_name(text, capsys):
    with pytest.raises(SystemExit):
        command.check(["GPT-2", "--gpus", text])
    assert "is not of the kind 64xH100" in capsys.readouterr().err


@pytest.mark.parametrize("sharding, recipe, is_counted", [
    ("FSDP", "bf16 policy", True), ("ZeRO-1", "bf16", True), ("DDP", "fp32", True),
    ("HSDP", "bf16 policy", False), ("DDP", "bf16 policy", False)])
def test_exact_counts_every_tensor_where_that_can_be_done(monkeypatch, capsys, sharding, recipe,
                                                          is_counted):
    arguments = ("GPT-2", "--gpus", "8xA100-80", "--tp", "1", "--micro-batch", "1", "--sharding",
                 sharding, "--recompute", "none", "--batch", "8", "--sequence", "256", "--recipe",
                 recipe)
    code, out, _ = ask(monkeypatch, capsys, *arguments)
    assert code == 0 and ("--exact counts every tensor" in out) == is_counted
    code, out, _ = ask(monkeypatch, capsys, *arguments, "--exact")
    assert code == 0 and "--exact" not in out
    assert ("17 runs (every tensor counted)" in " ".join(out.split())) == is_counted


def test_without_exact_torch_is_not_imported():
    """A command that answers in a second: importing torch and transformers takes longer."""
    program = ("import sys; sys.argv = ['plan', 'Llama-3-8B', '--gpus', '8xH100', '--tp', '1']\n"
               "from _plan.__main__ import main; main(); assert 'torch' not in sys.modules")
    found = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "scripts")))}
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, env=found)


def test_what_is_proposed_fits_by_the_number_that_is_shown(monkeypatch, capsys):
    """With every tensor counted, too: 8B on 4 GPUs, where little is left."""
    _, out, _ = ask(monkeypatch, capsys, "Llama-3-8B", "--gpus", "4xH100", "--tp", "1", "--pp", "1",
                    "--cp", "1", "--exact", "--json")
    found = json.loads(out)["answers"]
    assert [answer["memory"]["counted"] for answer in found].count(True) == 1
    for answer in found:
        memory = answer["memory"]
        assert answer["fits"] and memory["largest"] + memory["cuda_and_nccl"] <= memory["card"]
        assert memory["largest"] == pytest.approx(sum(memory["stages"]["0"].values()))


def test_a_sequence_is_no_longer_than_the_models_positions(monkeypatch, capsys):
    _, out, _ = ask(monkeypatch, capsys, "GPT-2", "--gpus", "8xH100", "--json")
    assert json.loads(out)["sequence"] == 1024


def test_a_measured_step_corrects_the_prediction(monkeypatch, capsys, tmp_path):
    arguments = ("Llama-3-8B", "--gpus", "64xH100", "--json")
    _, out, _ = ask(monkeypatch, capsys, *arguments)
    before = json.loads(out)["answers"][0]["seconds"]["total"]
    step = tmp_path / "step.json"
    step.write_text(json.dumps({"seconds": 1.9, "gpus": 8, "batch": 16, "micro_batch": 2,
                                "sharding": "FSDP", "recompute": "full"}))
    code, out, _ = ask(monkeypatch, capsys, *arguments, "--calibrate", str(step))
    found = json.loads(out)
    assert code == 0 and "so the kernels take" in found["calibration"]
    assert found["answers"][0]["seconds"]["total"] != pytest.approx(before)


def test_a_configuration_can_be_a_file_or_its_folder(tmp_path):
    config = {"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 3,
              "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 512,
              "vocab_size": 1000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = shape_named(str(tmp_path))
    assert shape == shape_named(str(tmp_path / "config.json"))
    assert (shape.layers, shape.hidden, shape.kv_heads) == (3, 256, 2)


def test_a_mixture_is_answered_with_its_experts_divided_or_not(monkeypatch, capsys, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "olmoe"}))
    arguments = (str(config), "--gpus", "64xH100")
    code, out, _ = ask(monkeypatch, capsys, *arguments)
    assert code == 0
    assert "a layer has 64 experts, of which a token uses 8" in " ".join(out.split())
    code, out, _ = ask(monkeypatch, capsys, *arguments, "--ep", "8")
    assert code == 0 and out.count(", EP 8, ") == 3 and "code base not fitted, experts" in out
    code, out, _ = ask(monkeypatch, capsys, *arguments, "--ep", "1")
    assert code == 0 and " EP " not in out.replace("without EP", "")
    whole = (*arguments, "--ep", "16", "--sharding", "FSDP", "--micro-batch", "1", "--recompute",
             "none", "--dp", "64")
    code, out, _ = ask(monkeypatch, capsys, *whole)
    assert code == 0 and "\nDP 64, EP 16, FSDP, micro-batch 1" in out
    assert "tokens sent to experts" in " ".join(out.split())
    code, out, _ = ask(monkeypatch, capsys, *whole, "--json")
    assert json.loads(out)["answers"][0]["plan"]["expert"] == 16
    code, out, err = ask(monkeypatch, capsys, *arguments, "--ep", "3")
    assert code == 1 and not out and err.count("\n") == 1
    assert "--ep 3: 64 experts cannot be divided by it" in err


def test_exact_says_that_fsdp2_pads_fewer_experts_than_ranks(monkeypatch, capsys, tmp_path):
    """Measured in tests/mixture_of_experts/test_layer_bytes.py."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps({
        "model_type": "mixtral", "hidden_size": 256, "intermediate_size": 512, "vocab_size": 1000,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}))
    found = {}
    for gpus in (8, 16):
        arguments = (str(config), "--gpus", f"{gpus}xH100", "--dp", str(gpus), "--ep", "1",
                     "--sharding", "FSDP", "--micro-batch", "1", "--recompute", "full",
                     "--sequence", "512")
        code, out, err = ask(monkeypatch, capsys, *arguments, "--exact")
        assert code == 0, err
        found[gpus] = " ".join(out.split())
    assert "8 of 16 ranks keep one each, and a gathered layer is padded to 16 experts" in found[16]
    assert "padded to" not in found[8]


@pytest.mark.parametrize("content, says", [
    ("nothing", "cannot read"), ("{}", "names no model_type"), ("[1]", "names no model_type"),
    ('{"model_type": "abacus"}', "abacus")])
def test_a_file_that_is_no_configuration_gets_one_sentence(tmp_path, content, says):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(NoModel, match=says):
        shape_named(str(tmp_path))


def test_a_known_model_has_the_sizes_of_its_configuration():
    from labs.predictions.memory.parameters import count, shape_of
    from labs.training import hf_configs

    for name in ("GPT-2", "Llama-2-7B", "Llama-3-70B", "Qwen2-0.5B", "Qwen2-7B"):
        assert count(shape_named(name)) == count(shape_of(hf_configs.config(name)))


# As scripts/preflight --full --json printed it; the numbers are those of an H200 that was measured
# (experiments/reference/h200/rates.json), the bus bandwidth that of its table.
PREFLIGHT = {"ok": True, "rows": [
    {"name": "GPUs", "status": "ok", "value": "8 x NVIDIA H200", "advice": "", "data": {}},
    {"name": "speed", "status": "ok", "value": "", "advice": "", "data": {
        "gpu": "NVIDIA H200", "bytes": 150109880320, "dtype": "bfloat16", "side": 8192,
        "flops": 802.9e12, "launch_s": 8.46e-6}},
    {"name": "bandwidth", "status": "ok", "value": "", "advice": "", "data": {
        "busbw": {"1000000": 4.1e10, "16000000": 2.5e11, "256000000": 3.6e11}}}]}


def preflight_file(tmp_path, speed=None, bandwidth=None):
    content = json.loads(json.dumps(PREFLIGHT))
    content["rows"][1]["data"] |= speed or {}
    content["rows"][2]["data"] = content["rows"][2]["data"] if bandwidth is None else bandwidth
    path = tmp_path / "node.json"
    path.write_text(json.dumps(content))
    return str(path)


def test_what_preflight_measured_corrects_products_host_and_links(monkeypatch, capsys, tmp_path):
    arguments = ("Llama-3-8B", "--gpus", "8xH200", "--sharding", "FSDP", "--recompute", "none",
                 "--micro-batch", "1", "--tp", "1", "--batch", "8", "--json")

    def causes(*more):
        _, out, err = ask(monkeypatch, capsys, *arguments, *more)
        assert not err
        found = json.loads(out)
        return found["answers"][0]["seconds"]["causes"], found["calibration"]

    usual, _ = causes()
    found, said = causes("--calibrate", preflight_file(tmp_path))
    assert "matrix products run at 1.01 times their rate" in said and "360 GB/s" in said
    assert "the network between nodes stays as it was" in said
    assert found["matmul"] == pytest.approx(usual["matmul"] / 1.0148, rel=1e-3)
    assert found["memory"] == usual["memory"] and found["attention"] == usual["attention"]
    slow, said = causes("--calibrate", preflight_file(
        tmp_path, {"flops": 4e14, "launch_s": 3e-5}, {}))
    assert "what is sent between GPUs stays as it was" in said
    assert slow["matmul"] > 1.9 * usual["matmul"] and slow["launch"] > usual["launch"]


@pytest.mark.parametrize("speed, bandwidth, says", [
    ({"gpu": ""}, None, "has no measured speed of a GPU: run scripts/preflight --full"),
    ({"gpu": "NVIDIA A100-SXM4-80GB", "bytes": 85e9}, None,
     "was measured on an A100-80, and the plan is for an H200"),
    ({"flops": 1e12}, None, "1 TFLOP/s were measured, and an H200 reaches"),
    ({"launch_s": 1.0}, None, "from one small kernel to the next"),
    ({}, {"busbw": {"256000000": 9e11}}, "another GPU"),
    ({"flops": None}, None, "is no measured step such as")])
def test_preflight_of_another_machine_gets_one_sentence(monkeypatch, capsys, tmp_path, speed,
                                                        bandwidth, says):
    code, out, err = ask(monkeypatch, capsys, "GPT-2", "--gpus", "8xH200", "--calibrate",
                         preflight_file(tmp_path, speed, bandwidth))
    assert code == 1 and says in err and not out and err.count("\n") == 1
