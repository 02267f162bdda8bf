"""The client's side of a call."""
