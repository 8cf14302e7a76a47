"""Command line of scripts/plan. Python 3.6 reads this file too: it answers --help before set-up."""

import argparse
import json
import os
import re
import sys

from _arguments import positive

EPILOG = """\
MODEL is a name that the workbook knows (Llama-3-8B), a file like config.json or its folder, or a
name of the hub (Qwen/Qwen3-4B) where the hub can be reached.

Without sizes the three fastest plans that fit are proposed; a size that is given is kept. Every
prediction stands with the interval that held 80 % of measured runs of its kind.

examples:
  scripts/plan Llama-3-8B --gpus 64xH100
  scripts/plan Llama-3-70B --gpus 512xH100 --tp 8 --pp 4 --sequence 8192 --batch 1024
  scripts/plan GPT-2 --gpus 8xA100-80 --sharding FSDP --calibrate step.json
  scripts/plan mistralai/Mixtral-8x7B-v0.1 --gpus 64xH100 --ep 8
  scripts/plan Llama-3-8B --gpus 64xH100 --code nanotron --json

exit code: 0; 1 where no plan fits, or the one that was asked for cannot be run; 2 if an argument is
wrong.

--calibrate FILE is one of two:
  {"seconds": 1.23, "gpus": 8, "micro_batch": 2, ...}: one measured step with the sizes of its plan
  in the names of these options (data is what is left over);
  the output of scripts/preflight --full --json on a machine with the GPUs: it corrects the rate of
  matrix products, the host that starts kernels, and the links between a node's GPUs.
"""
SIZES = (("tp", "tensor"), ("pp", "pipeline"), ("dp", "data"), ("cp", "context"),
         ("micro-batch", "micro_batch"))


def check(arguments):
    """The parsed command line; exits with a sentence if it is wrong."""
    parser = argparse.ArgumentParser(
        prog="scripts/plan", formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Say what a training job will take: memory, seconds, dollars, and how sure "
                    "that is.", epilog=EPILOG)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--gpus", type=gpus, required=True, metavar="NxGPU",
                        help="such as 64xH100; the GPUs are T4, A10, A100-40, A100-80, H100, "
                             "H200, B200, A6000")
    parser.add_argument("--gpus-per-node", type=positive(int), default=8)
    parser.add_argument("--sequence", type=positive(int),
                        help="tokens (4096, or what the model has positions for)")
    parser.add_argument("--batch", type=positive(int),
                        help="sequences of one step on all GPUs (default: 4 million tokens, at "
                             "least one a GPU)")
    for name, what in SIZES:
        parser.add_argument("--" + name, dest=what, type=positive(int),
                            help=what.replace("_", "-") + ("" if name == "micro-batch"
                                                           else "-parallel ranks"))
    parser.add_argument("--ep", dest="expert", type=positive(int),
                        help="data-parallel ranks over which a layer's experts are divided")
    parser.add_argument("--sharding", choices=["DDP", "ZeRO-1", "FSDP", "HSDP"])
    parser.add_argument("--recompute", choices=["none", "selective", "full"])
    parser.add_argument("--offload", action="store_true", default=None,
                        help="shards, gradients and AdamW on the host, under FSDP")
    parser.add_argument("--loss", choices=["eager", "in place", "chunked"],
                        help="how the loss treats its logits (the code base's)")
    parser.add_argument("--lora", type=positive(int), default=0, metavar="RANK",
                        help="train matrices of this rank beside frozen ones")
    parser.add_argument("--stages", type=stages, metavar="KIND",
                        help='layers of the pipeline\'s stages: equal, "by cost", or 9,8,8,7')
    parser.add_argument("--recipe", help='bytes a parameter, such as "bf16, fp32 master" (the code '
                                         "base's)")
    parser.add_argument("--code", help="the code base that trains: nanotron, Megatron-Core, ... "
                                       "(PyTorch, eager)")
    parser.add_argument("--compiled", action="store_true", help="torch.compile")
    parser.add_argument("--calibrate", metavar="FILE",
                        help="one measured step, or scripts/preflight's output, as below")
    parser.add_argument("--exact", action="store_true",
                        help="count every tensor of plans with DDP, ZeRO-1 or FSDP alone, as "
                             "labs.plan does: some seconds")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(arguments)


def gpus(text):
    """(count, name) from 64xH100."""
    found = re.match(r"(\d+) *[x×] *(\S+)$", text)
    if not found or not int(found.group(1)):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the kind 64xH100")
    return int(found.group(1)), found.group(2)


def stages(text):
    """A kind of stages, or a tuple of layers."""
    return tuple(map(int, text.split(","))) if re.match(r"\d+(,\d+)*$", text) else text


def main():
    """Prints the answer; returns the exit code."""
    arguments = check(sys.argv[1:])
    from _plan import asked, printed

    try:
        question = asked.question(arguments)
        answers = asked.answers(question, arguments.exact)
    except ValueError as error:
        print(f"scripts/plan: {error}", file=sys.stderr)
        return 1
    text = (json.dumps(printed.as_json(question, answers)) if arguments.json
            else printed.text(question, answers))
    try:
        print(text, flush=True)
    except BrokenPipeError:  # of `| head`: what it wanted it has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0 if answers and all(answer.is_feasible for answer in answers) else 1


if __name__ == "__main__":
    sys.exit(main())
