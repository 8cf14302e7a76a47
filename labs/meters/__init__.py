"""What did happen: memory, traffic, trace, throughput."""
