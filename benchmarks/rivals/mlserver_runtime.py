"""The model as MLServer's runtime, which the file of model settings names."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse

from benchmarks.rivals.onnx_model import OnnxModel, Order

__all__ = ["EmbeddingRuntime"]


class EmbeddingRuntime(MLModel):  # type: ignore[misc]
    """Runs batches in a thread, so that the event loop gathers the next one meanwhile."""

    async def load(self) -> bool:
        """Load the model of the order in the settings' extra."""
        self._order = Order.from_json(self.settings.parameters.extra["order"])
        self._model = OnnxModel(self._order)
        self._thread = ThreadPoolExecutor(1)
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """Embed the one input of a batch of requests."""
        embeddings = await asyncio.get_running_loop().run_in_executor(self._thread, self._embed, payload)
        return InferenceResponse(
            model_name=self.name, outputs=[NumpyCodec.encode_output("embeddings", embeddings)]
        )

    def _embed(self, payload: InferenceRequest) -> "np.ndarray":
        tensor = payload.inputs[0]
        if self._order.encoded:
            return self._model.embed([bytes(each) for each in tensor.data])
        return self._model.embed_pixels(NumpyCodec.decode_input(tensor))
