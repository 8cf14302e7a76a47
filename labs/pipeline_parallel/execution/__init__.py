"""Pipeline schedules on real ranks: stages of a model, the messages between them, a runner."""
