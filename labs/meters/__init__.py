"""What did happen: traffic, timeline, throughput."""
