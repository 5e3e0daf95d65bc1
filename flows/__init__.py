"""Flows: lists of tasks, each also a command (`python -m flows.post_train`, `python -m flows.finish`)."""
