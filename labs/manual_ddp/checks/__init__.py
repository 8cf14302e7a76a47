"""The checks of notebook 02, a file for each exercise: 2.1 combine, 2.2 broadcast_state, 2.3
average_gradients, 2.4 manual_ddp, 2.5 buckets, 2.6 one_bucket, 2.7 overlap, 2.8 no_sync, 2.9
accumulate, 2.11 ready_order. In 2.10 the student writes nothing: its comparison is in
labs.manual_ddp.variants."""
