"""Data sets on disk as rows (image, label, split); a format a file. Used by both halves."""
