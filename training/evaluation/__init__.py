"""Retrieval metrics, protocols, sweeps."""
