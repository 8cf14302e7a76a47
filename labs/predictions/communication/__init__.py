"""What collectives send, over which links of a cluster, and which way of sharding sends least."""
