"""Jobs of known sizes, from 1.3B parameters on one node to 405B on 16,384 GPUs. "One card": the 8
GPUs of a node share a network card of 100 Gbit/s, where the others have a card for each GPU.

Sizes of the GPTs: Narayanan et al., SC 2021 (arXiv 2104.04473), table 1, and Brown et al., 2020
(arXiv 2005.14165), table 2.1; of the Llamas: Grattafiori et al., 2024 (arXiv 2407.21783), table 3.
"""

from labs.predictions.hardware import gpu
from labs.predictions.memory.shape import Shape
from labs.predictions.plans.job import Job


def _gpt(hidden, layers, heads) -> Shape:
    return Shape("gpt2", hidden, layers, heads, heads, hidden // heads, 4 * hidden, 51200, 2048,
                 tied=True, qkv_bias=True, out_bias=True, mlp_bias=True)


def _llama(hidden, layers, heads, ffn) -> Shape:
    return Shape("llama", hidden, layers, heads, 8, hidden // heads, ffn, 128256)


JOBS = {job.name: job for job in (
    Job("GPT-1.3B", _gpt(2048, 24, 16), 2048, 512, gpu("A100-80"), 8),
    Job("GPT-1.3B, one card", _gpt(2048, 24, 16), 2048, 512, gpu("A100-40"), 64, adapters=1,
        adapter=12.5e9),
    Job("Llama-3-8B", _llama(4096, 32, 32, 14336), 8192, 512, gpu("H100"), 64),
    Job("Llama-3-8B, long", _llama(4096, 32, 32, 14336), 131072, 32, gpu("H100"), 64),
    Job("Llama-3-70B", _llama(8192, 80, 64, 28672), 8192, 1024, gpu("H100"), 512),
    Job("Llama-3-70B on 32", _llama(8192, 80, 64, 28672), 8192, 128, gpu("H100"), 32),
    Job("GPT-175B", _gpt(12288, 96, 96), 2048, 1536, gpu("A100-80"), 3072, flash=False),
    Job("GPT-175B on 64", _gpt(12288, 96, 96), 2048, 64, gpu("A100-80"), 64, flash=False),
    Job("Llama-3-405B", _llama(16384, 126, 128, 53248), 8192, 2048, gpu("H100"), 16384),
    Job("Llama-3-405B on 8", _llama(16384, 126, 128, 53248), 8192, 16, gpu("H100"), 8))}
"""Name -> Job; the last one fits nowhere on its GPUs."""
