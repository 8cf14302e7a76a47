"""Meshes of published runs.

Source: Grattafiori et al., "The Llama 3 Herd of Models", 2024 (arXiv 2407.21783), table 4.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class MeshRow:
    """Sizes of the dimensions as a report prints them. sequence: tokens; tflops: 16-bit TFLOP/s of
    a GPU; mfu: percent. Both are 0 where a row is made up."""

    gpus: int
    tensor: int
    context: int
    pipeline: int
    data: int
    sequence: int = 8192
    tflops: float = 0
    mfu: float = 0

    def __repr__(self):
        product = self.tensor * self.context * self.pipeline * self.data
        return (f"{self.gpus:,} GPUs; TP {self.tensor} × CP {self.context} × PP {self.pipeline} × "
                f"DP {self.data} = {product:,}")


LLAMA_3 = (MeshRow(8192, 8, 1, 16, 64, 8192, 430, 43), MeshRow(16384, 8, 1, 16, 128, 8192, 400, 41),
           MeshRow(16384, 8, 16, 16, 4, 131072, 380, 38))
"""As printed, its last row's wrong size too."""
