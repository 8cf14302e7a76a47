"""The checks of notebook 02, by exercise: 2.1 combine, 2.2 broadcast_state, 2.3 and 2.4
average_gradients, 2.5 and 2.6 buckets, 2.7 overlap, 2.8 and 2.9 accumulation. In 2.10 the student
writes nothing: its comparison is in labs.manual_ddp.variants."""
