"""From pixels and labels to an ONNX file: needs the `train` extra (torch)."""
