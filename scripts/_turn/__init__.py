"""One node for many students: each gets some of its GPUs for some minutes, in order of arrival."""
