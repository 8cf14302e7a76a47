"""What a rented node costs: for what preflight predicts before anything was measured."""

# Lambda, on-demand 8x A100 SXM 80 GB: 2.79 dollars per GPU and hour, billed by the minute
# (https://lambda.ai/instances, as read in September 2026). Others were 1.39 to 3.43 that autumn.
A100_HOUR = 2.79  # dollars per GPU
NODE_GPUS = 8


def node_dollars(minutes: float) -> float:
    """Dollars for `minutes` of an 8xA100-80GB node at the list price above."""
    return minutes / 60 * NODE_GPUS * A100_HOUR
