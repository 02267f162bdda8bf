"""The artifact, how it describes itself and how it is run; used by both halves."""
