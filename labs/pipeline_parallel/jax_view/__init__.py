"""JAX beside torch: its programs run in a process of their own, and only that process imports JAX.
"""
