"""Why data parallelism is not enough: what one sequence needs on one rank, by formula."""

from labs.pictures import marks
from labs.pictures.memory import MemoryRow, memory_bars
from labs.pictures.picture import Picture
from labs.predictions import hardware
from labs.predictions.memory.predict import predict
from labs.training import hf_configs
from labs.workers.progress import status

SEQUENCES = (8_192, 131_072)  # tokens: of Llama 3's pre-training, and of its last stage
# Llama 3 (arXiv 2407.21783), table 3.
LLAMA_405B = {"hidden_size": 16_384, "num_hidden_layers": 126, "num_attention_heads": 128,
              "num_key_value_heads": 8, "intermediate_size": 53_248, "vocab_size": 128_256}


def show_one_sequence(ranks: int = 16_384, gpu: str = "H100") -> Picture:
    """The predicted peak of one of `ranks` ranks that trains Llama-3-70B or 405B with FSDP2 on one
    sequence, in bf16 with fp32 shards, each layer checkpointed, the loss computed in pieces; and
    what the GPU has."""
    with status("loading transformers"):  # once, and it takes seconds
        models = {"Llama-3-70B": hf_configs.config("Llama-3-70B"),
                  "Llama-3-405B": hf_configs.make("llama", **LLAMA_405B)}
        rows = [MemoryRow(f"{name}\n{sequence:,} tokens", None,
                          _peak(config, sequence, ranks)) for name, config in models.items()
                for sequence in SEQUENCES]
    capacity = hardware.gpu(gpu)
    # too thin for the eye, and so for the legend: said in words
    shards = max(row.predicted.parameters + row.predicted.optimizer_state for row in rows)
    above = sum(row.predicted.total > capacity.usable for row in rows)
    return memory_bars(rows, f"of one of {ranks:,} ranks at the peak of a step",
                       [(capacity.usable, gpu)], unit="GB",
                       note="buffers: the layers that FSDP has gathered. Too thin to be seen: the "
                            "shards of parameters and optimizer state, together "
                            f"{marks.format_number(shards / 1e9)} GB at most",
                       lesson=f"{above} of {len(rows)} do not fit on an {gpu}: FSDP does not shard "
                              "activations")


def _peak(config, sequence, ranks):
    return predict(config, batch=1, sequence=sequence, ranks=ranks, strategy="fsdp2",
                   recipe="bf16 policy", checkpointing="full", device="cuda", backend="nccl",
                   adamw="fused", loss="fused")["peak"]
