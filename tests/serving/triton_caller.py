"""Calls a server with tritonclient as other people do; runs in .venv-tritonclient, without our code.

Arguments: the address of the server; a file of pixels, uint8 (3, S, S, 3). Prints what was answered as JSON.
"""

# mypy: ignore-errors
# since tritonclient is not where the types are checked

import json
import queue
import sys
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

PHOTOS = [b"photo 0", b"photo 1", b"photo 2"]
CONCURRENT = 32


def tensor(name: str, datatype: str, array: Any) -> Any:
    given = triton.InferInput(name, list(array.shape), datatype)
    given.set_data_from_numpy(array)
    return given


def files(*photos: bytes) -> Any:
    return tensor("encoded", "BYTES", np.array(photos, object))


def ready(client: Any) -> dict[str, Any]:
    return {
        "live": client.is_server_live(),
        "ready": client.is_server_ready(),
        "models": {
            f"{name}/{version}": client.is_model_ready(name, version)
            for name, version in (("fake", ""), ("fake", "1"), ("fake", "2"), ("other", ""))
        },
        "server": client.get_server_metadata(as_json=True),
        "model": client.get_model_metadata("fake", "1", as_json=True),
    }


def inferred(client: Any, pixels: Any) -> dict[str, Any]:
    outputs = [triton.InferRequestedOutput(name) for name in ("assignments", "embeddings", "histograms")]
    given = {
        "pixels": tensor("images", "UINT8", pixels),
        "row": files(*PHOTOS),
        "column": tensor("encoded", "BYTES", np.array(PHOTOS, object)[:, None]),
    }
    found = {}
    for name, each in given.items():
        result = client.infer("fake", [each], model_version="1", request_id=name, outputs=outputs)
        head = result.get_response()
        arrays = {output.name: result.as_numpy(output.name).tolist() for output in head.outputs}
        found[name] = [head.model_name, head.model_version, head.id, arrays]
    return found


def at_once(client: Any) -> list[Any]:
    """Many calls in flight; the embeddings in the order of the calls."""
    done: queue.Queue[Any] = queue.Queue()
    for i in range(CONCURRENT):

        def keep(result: Any, error: Any, i: int = i) -> None:
            done.put((i, str(error) if error else result.as_numpy("embeddings")[0].tolist()))

        client.async_infer("fake", [files(b"photo %d" % i)], keep, client_timeout=10)
    return [each for _, each in sorted(done.get(timeout=10) for _ in range(CONCURRENT))]


def refusals(client: Any, pixels: Any) -> dict[str, Any]:
    calls = {
        "model": lambda: client.infer("other", [files(b"1")]),
        "version": lambda: client.infer("fake", [files(b"1")], model_version="2"),
        "type": lambda: client.infer("fake", [tensor("images", "FP32", pixels.astype(np.float32))]),
        "image": lambda: client.infer("fake", [files(b"photo 0", b"bad")]),
        "extension": lambda: client.get_model_config("fake"),
    }
    told = {}
    for name, call in calls.items():
        try:
            call()
        except InferenceServerException as error:
            told[name] = [error.status(), error.message()]
    return told


def contract() -> dict[str, Any]:
    """The fields of every message, as tritonclient knows them."""
    told: dict[str, Any] = {}
    waiting = list(service_pb2.DESCRIPTOR.message_types_by_name.values())
    for message in waiting:
        waiting.extend(message.nested_types)
        told[message.full_name] = {field.name: [field.number, field.type] for field in message.fields}
    return told


def main(address: str, path: str) -> None:
    pixels = np.load(path)
    with triton.InferenceServerClient(address) as client:
        told = {
            "ready": ready(client),
            "inferred": inferred(client, pixels),
            "at once": at_once(client),
            "refusals": refusals(client, pixels),
        }
    print(json.dumps(told | {"contract": contract()}))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
