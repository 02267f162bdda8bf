"""The training loop, its optimiser, its run folder."""
