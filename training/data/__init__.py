"""Images, their augmentation and their batches."""
