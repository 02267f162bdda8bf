"""The command `crossbatch index`: the images of a data set into a gallery."""
