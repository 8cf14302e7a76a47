"""Runs a script on ranks that Ray places: python scripts/cluster/ray_train.py -n 2 train.py

Options of the script come after its name. Ray watches the ranks; where one fails, it starts all of
them again, on nodes that are left. The script begins again then, so it has to save checkpoints and
read them.
"""

import argparse
import runpy
import sys
import tempfile
from pathlib import Path

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

LABS = Path(__file__).resolve().parents[2] / "labs"


def run_rank(job: dict) -> None:
    """On a rank: runs the script as torchrun would. Ray has set RANK, LOCAL_RANK and the rest."""
    import torch.distributed as dist

    dist.destroy_process_group()  # Ray's: the script joins one itself
    with tempfile.TemporaryDirectory() as folder:  # ranks of one node share the working folder
        path = Path(folder, "script.py")
        path.write_text(job["text"], encoding="utf-8")
        sys.argv = [str(path), *job["arguments"]]
        runpy.run_path(str(path), run_name="__main__")


def trainer(script: Path, arguments: list[str], ranks: int, gpus: bool, results: str,
            failures: int = 0) -> TorchTrainer:
    """The job, not yet started. results: a folder that all nodes share, or a bucket."""
    job = {"text": script.read_text(encoding="utf-8"), "arguments": arguments}
    return TorchTrainer(
        run_rank, train_loop_config=job,
        scaling_config=ScalingConfig(num_workers=ranks, use_gpu=gpus),
        run_config=RunConfig(name=script.stem, storage_path=results,
                             failure_config=FailureConfig(max_failures=failures)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", "--ranks", type=int, default=2)
    parser.add_argument("--gpus", action="store_true", help="one for each rank")
    parser.add_argument("--results", default=str(Path("experiments", "ray").absolute()))
    parser.add_argument("--failures", type=int, default=0, help="restarts before it gives up")
    parser.add_argument("script", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    ray.init(runtime_env={"py_modules": [str(LABS)]})  # labs is sent to every node
    trainer(options.script, options.arguments, options.ranks, options.gpus, options.results,
            options.failures).fit()


if __name__ == "__main__":
    main()
