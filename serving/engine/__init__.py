"""Models at work: instances, batches, and the galleries as calls see them."""
