"""Tests; `tests.training` and `tests.serving` mirror the two halves."""
