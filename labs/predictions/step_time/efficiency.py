"""6ND, MFU and HFU: what a training step has to compute, and which share of a GPU's peak that is.

Three counts of FLOPs are in use, and they differ; so each has a function here.
- 6ND: 6 FLOPs per parameter and token, 2 forward and 4 backward (Kaplan et al., "Scaling Laws for
  Neural Language Models", 2020, arXiv 2001.08361, section 2.1). It leaves attention's products out.
- 6N + 12·L·h·s per token adds them (Chowdhery et al., "PaLM", 2022, arXiv 2204.02311, appendix B).
- Product by product, so that embedding look-ups count nothing (Narayanan et al., "Efficient
  Large-Scale Language Model Training on GPU Clusters", SC 2021, arXiv 2104.04473, equation 3).

All three count attention over the whole s × s square. A causal kernel computes half of it, but
published figures do not say so. MFU counts what the model needs; HFU counts what the GPU does, so
recomputation adds to HFU alone (Korthikanti et al., 2022, arXiv 2205.05198, section 6.4).

The peak is the dense one: 989 TFLOP/s for an H100 in 16 bits. The 1,979 of its data sheet is the
rate with structured sparsity, and halves every MFU.
"""

RECOMPUTE = ("none", "selective", "full")


def six_nd(parameters: float, tokens: float) -> float:
    """FLOPs of training on `tokens` tokens: 6·N·D. 7B parameters on 2T tokens: 8.4e22."""
    return 6 * parameters * tokens


def attention_flops(layers: int, hidden: int, sequence: int) -> float:
    """FLOPs per token, forward and backward, of Q·Kᵀ and of the product with V: 12·L·h·s."""
    return 12 * layers * hidden * sequence


def flops_per_token(parameters: float, layers: int, hidden: int, sequence: int) -> float:
    """FLOPs per token, forward and backward: 6N + 12·L·h·s (PaLM, appendix B)."""
    return six_nd(parameters, 1) + attention_flops(layers, hidden, sequence)


def gpt_flops_per_token(layers: int, hidden: int, vocabulary: int, sequence: int,
                        recompute: str = "none") -> float:
    """FLOPs per token of a GPT whose MLP is 4h wide, forward, backward and recomputed.

    Without recomputation 72·L·h²·(1 + s/6h + V/12Lh), the model's FLOPs. "full" runs the layers'
    forward again: 96·L·h²·(1 + s/6h + V/16Lh), equation 3 of Narayanan et al. "selective" runs
    attention's two products forward again, 4·L·h·s. The HFU that Korthikanti et al. publish counts
    12·L·h·s for it, as if backward ran again too.
    """
    if recompute not in RECOMPUTE:
        raise ValueError(f"no recompute {recompute!r}: choose {', '.join(RECOMPUTE)}")
    products = 24 * layers * hidden**2  # 12h² weights, 2 FLOPs each
    attention = attention_flops(layers, hidden, sequence) / 3
    again = {"none": 0, "selective": attention, "full": products + attention}[recompute]
    return 3 * (products + attention + 2 * hidden * vocabulary) + again


def utilization(flops: float, tokens_per_s: float, peak: float) -> float:
    """Share of the peak. flops: per token; tokens_per_s: per GPU; peak: dense FLOP/s.
    It is MFU if `flops` are the model's, HFU if they include what is recomputed."""
    return flops * tokens_per_s / peak


def mfu(tokens_per_s: float, peak: float, *, parameters: float, layers: int, hidden: int,
        sequence: int) -> float:
    """Model FLOPs utilization, 0 to 1, with 6N + 12·L·h·s. tokens_per_s: per GPU."""
    return utilization(flops_per_token(parameters, layers, hidden, sequence), tokens_per_s, peak)


def hfu(model_utilization: float, recomputed: float = 1 / 3) -> float:
    """Hardware FLOPs utilization from MFU. recomputed: FLOPs run again, as a share of the model's;
    1/3 if the whole forward is, since forward is a third of forward and backward."""
    return model_utilization * (1 + recomputed)
