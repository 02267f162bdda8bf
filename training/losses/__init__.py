"""Losses and miners on embeddings."""
