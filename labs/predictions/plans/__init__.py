"""How a job is spread over GPUs in several dimensions: what one rank holds, how long a step takes,
and which way is the fastest that fits."""
