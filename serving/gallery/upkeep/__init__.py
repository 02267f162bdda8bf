"""Looking after a gallery: verifying all that is stored, one file of it, and back."""
