"""The page that `crossbatch report` writes: its parts, a section of the page a file."""
