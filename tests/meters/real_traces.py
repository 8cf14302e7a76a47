"""Traces of other people's GPUs, by which the reader of traces is tested. They are not part of this
repository: `python tests/meters/real_traces.py` fetches them to experiments/traces/, 9 MB, and
without them tests/meters/test_real_traces.py skips.

HolisticTraceAnalysis (Meta, MIT licence) and TraceLens (AMD, MIT licence) keep them as their own
tests' data. Each is pinned by its commit and its hash.
"""

import hashlib
import urllib.request
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "traces"
HTA = "facebookresearch/HolisticTraceAnalysis/f4d0062c382f42bd8a74838bcdad1916c7d5d2da/tests/data"
TRACELENS = "AMD-AGI/TraceLens/171dd74721ca1ec45709e5805b68ae1f65e27811/tests/traces"


@dataclass(frozen=True)
class RealTrace:
    """source: repository, commit and path. what: the run that it shows."""

    name: str
    source: str
    sha256: str
    what: str

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.json.gz"


TRACES = {each.name: each for each in (
    RealTrace("resnet50_ddp", f"{HTA}/nccl_parser_config/nccl_data.json.gz",
              "c1cf9c575fdcd7bdc6326ceab834f94b351f81ae55577a7471aa9e328fb8b58e",
              "ResNet-50 in fp32 under DDP on 2 GPUs, NCCL 2.17, 3 steps"),
    RealTrace("one_call_per_gradient", f"{HTA}/df_index_resolver/df_index_resolver.json.gz",
              "769af9ab5262468eb7baf6a7bfdb138ef15542264c72c0c313758d951b16dc15",
              "5 steps of SGD on 2 V100 in 2022, an all-reduce for each of 404 gradients, as 02's "
              "first module calls them"),
    RealTrace("recommender_2022", f"{HTA}/trace_diff/control/control.json.gz",
              "43ed872e4c5dc2e8da5946d761ed61923a75c6c799cc62be9e1c859d440a56fd",
              "a recommender on 8 GPUs in 2022, kernels without arguments of NCCL"),
    RealTrace("recommender_16", f"{HTA}/negative_queue_length_values_check/rank0.json.gz",
              "b8ce7a1a143b55dd1811d269272b09d1c693ffea85b91858f5fb246e7ad8c5f8",
              "a recommender on 16 GPUs in 2023, every collective's kernel is named SendRecv"),
    RealTrace("recommender_128", f"{HTA}/timeline_analysis/sampled_rank-0.json.gz",
              "71b98c30a2751cc56d9bf78f8fb76467acd56e0be6a1f0da23c600941d29aafd",
              "a sample of a recommender's step on 128 GPUs in 2023"),
    RealTrace("inference_b200", f"{TRACELENS}/b200/eager_trace.json.gz",
              "7f5e9c9dc4ba71371fde1d947204134575b05d7a614986f249fa8142663c7ca2",
              "gpt-oss in vLLM on 8 B200, kernels of CUDA graphs, and an all-gather of the logits"),
    RealTrace("resnet18_mi300", f"{TRACELENS}/mi300/resnet_act_checkpoint.json.gz",
              "0a6a7dfe1f0bf16c74876ebabffbac57b350d8897c4ad42c3dcf6d1dab2aa2aa",
              "ResNet-18 in bf16 under DDP on 8 MI300, RCCL, every kernel is named Generic"))}


def fetch(trace: RealTrace) -> None:
    """Writes the trace into FOLDER. Raises ValueError where the file is not the one expected."""
    if trace.path.exists():
        return
    with urllib.request.urlopen(f"https://raw.githubusercontent.com/{trace.source}",
                                timeout=60) as answer:
        data = answer.read()
    if hashlib.sha256(data).hexdigest() != trace.sha256:
        raise ValueError(f"{trace.source} has changed")
    FOLDER.mkdir(parents=True, exist_ok=True)
    trace.path.write_bytes(data)


if __name__ == "__main__":
    for one in TRACES.values():
        fetch(one)
        print(f"{one.path}: {one.what}")
