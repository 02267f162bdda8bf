"""What every call passes before it is answered, and where the server may listen."""
