"""Measuring collectives: one process per GPU, torch.distributed and an engine's own all-reduce."""
