"""MLServer with a model: `python mlserver_server.py ORDER`, where mlserver and onnxruntime are installed.

ORDER is an `Order` as JSON. It says `serving on HOST:PORT` when it answers, and ends with SIGTERM.
"""

import json
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

from benchmarks.driving.ports import free_ports
from benchmarks.rivals.onnx_model import Order

__all__ = ["main"]


def main(text: str) -> None:
    """Write the folder of settings that MLServer wants, and serve it until SIGTERM."""
    from mlserver.cli.main import root

    order = Order.from_json(text)
    http, grpc, metrics = free_ports(3)
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "host": "127.0.0.1",
            "http_port": http,
            "grpc_port": grpc,
            "metrics_port": metrics,
            "parallel_workers": order.workers,
            "debug": False,
            "grpc_max_message_length": 1 << 26,
        }
        model = {
            "name": "model",
            "implementation": "benchmarks.rivals.mlserver_runtime.EmbeddingRuntime",
            "max_batch_size": order.max_batch,
            "max_batch_time": order.delay_ms / 1e3,
            "parameters": {"extra": {"order": text}},
        }
        Path(folder, "settings.json").write_text(json.dumps(settings))
        Path(folder, "model-settings.json").write_text(json.dumps(model))
        threading.Thread(target=_tell, args=(http, grpc), daemon=True).start()
        root(["start", folder])


def _tell(http: int, grpc: int) -> None:
    """Say where it answers as soon as the model is ready."""
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{http}/v2/models/model/ready", timeout=5):
                break
        except OSError:
            time.sleep(0.1)
    sys.stdout.write(f"serving on 127.0.0.1:{grpc}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
