"""The wire contract and the stubs generated from it; imports nothing of ours."""
