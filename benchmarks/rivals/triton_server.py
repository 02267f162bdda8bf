"""Triton with a model in its Python backend: `python triton_server.py ORDER`, where pytriton is installed.

ORDER is an `Order` as JSON. It says `serving on HOST:PORT` when it answers, and ends with SIGTERM.
"""

import signal
import sys
import threading
from typing import Any

import numpy as np
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

from benchmarks.driving.ports import free_ports
from benchmarks.rivals.onnx_model import OnnxModel, Order

__all__ = ["main"]


def main(text: str) -> None:
    """Serve until SIGTERM."""
    order = Order.from_json(text)
    model = OnnxModel(order)

    @batch
    def infer(images: Any) -> dict[str, Any]:
        if order.encoded:
            return {"embeddings": model.embed([bytes(each) for each in images[:, 0]])}
        return {"embeddings": model.embed_pixels(images)}

    http, grpc, metrics = free_ports(3)
    config = TritonConfig(
        http_address="127.0.0.1",
        http_port=http,
        grpc_address="127.0.0.1",
        grpc_port=grpc,
        metrics_port=metrics,
    )
    pixels = Tensor(name="images", dtype=np.uint8, shape=(order.size, order.size, 3))
    done = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: done.set())
    with Triton(config=config) as triton:
        triton.bind(
            model_name="model",
            infer_func=infer,
            inputs=[Tensor(name="images", dtype=bytes, shape=(1,)) if order.encoded else pixels],
            outputs=[Tensor(name="embeddings", dtype=np.float32, shape=(-1,))],
            config=ModelConfig(
                max_batch_size=order.max_batch,
                batcher=DynamicBatcher(max_queue_delay_microseconds=round(1e3 * order.delay_ms)),
            ),
        )
        triton.run()
        sys.stdout.write(f"serving on 127.0.0.1:{grpc}\n")
        sys.stdout.flush()
        done.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
