"""Replica groups that go on without a restart: torchft's lighthouse and groups, each a process of
its own, of which one is killed and replaced. Only these processes import torchft."""
