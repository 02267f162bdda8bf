"""Embed photographs with NVIDIA's client: python examples/triton.py ADDRESS PHOTO...

Needs `pip install 'tritonclient[grpc]'`, in an environment without crossbatch, which
wants a newer protobuf.
"""

import sys
from pathlib import Path

import numpy as np
import tritonclient.grpc as triton

address, *paths = sys.argv[1:]
photos = np.array([Path(path).read_bytes() for path in paths], dtype=np.object_)

encoded = triton.InferInput("encoded", list(photos.shape), "BYTES")
encoded.set_data_from_numpy(photos)
with triton.InferenceServerClient(address) as client:
    result = client.infer("", [encoded], client_timeout=10)  # the first model; or its name
    embeddings = result.as_numpy("embeddings")  # float32 (photos, d), rows of unit length

np.savetxt(sys.stdout, embeddings)
