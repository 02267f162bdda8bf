"""Searching one state of a gallery: what is demanded, what the index and the newer items have of it."""
