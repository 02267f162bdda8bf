"""Tests of `training`."""
