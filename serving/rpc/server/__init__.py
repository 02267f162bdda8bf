"""The serve command: its settings, its process, its parts put together."""
