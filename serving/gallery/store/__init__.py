"""The truth of a gallery in one SQLite file: its tables, its transactions, what its damage looks like."""
