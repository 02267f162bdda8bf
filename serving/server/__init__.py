"""The serve command: its process or processes, its parts put together."""
