"""Losses and miners on embeddings, and what a training step makes of them."""
