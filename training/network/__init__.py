"""Backbones, pooling, head, and their weights."""
