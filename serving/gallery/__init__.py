"""Galleries: the truth in SQLite, the search in FAISS."""
