"""What answers each call: a service a file, and what they share."""
