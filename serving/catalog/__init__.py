"""Data sets on disk as rows (image, label, split); a format a file. Used by both halves."""

from serving.catalog.catalog import SplitRule, read, select, select_missing

__all__ = ["SplitRule", "read", "select", "select_missing"]
