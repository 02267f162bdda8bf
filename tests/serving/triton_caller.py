"""Calls a server with tritonclient as other people do; runs in .venv-tritonclient, without our code.

Arguments: the address of the server, and a file of pixels and their answers.
"""

# mypy: ignore-errors
# since tritonclient is not where the types are checked

import sys
from typing import Any

import numpy as np
import tritonclient.grpc as triton

PHOTOS = [b"photo 0", b"photo 1", b"photo 2"]
OUTPUTS = ("assignments", "embeddings", "histograms")


def tensor(name: str, datatype: str, array: Any) -> Any:
    given = triton.InferInput(name, list(array.shape), datatype)
    given.set_data_from_numpy(array)
    return given


def files(*photos: bytes) -> Any:
    return tensor("encoded", "BYTES", np.array(photos, object))


def find_server_and_model(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    named = (("fake", ""), ("fake", "1"), ("fake", "2"), ("other", ""))
    assert [client.is_model_ready(*each) for each in named] == [True, True, False, False]
    assert client.get_server_metadata(as_json=True)["name"] == "crossbatch"
    model = client.get_model_metadata("fake", "1", as_json=True)
    assert [each["name"] for each in model["inputs"]] == ["images", "encoded"]
    assert sorted(each["name"] for each in model["outputs"]) == list(OUTPUTS)


def infer(client: Any, given: Any) -> None:
    outputs = [triton.InferRequestedOutput(name) for name in OUTPUTS]
    column = tensor("encoded", "BYTES", np.array(PHOTOS, object)[:, None])
    for each in (tensor("images", "UINT8", given["pixels"]), files(*PHOTOS), column):
        result = client.infer("fake", [each], model_version="1", request_id="7", outputs=outputs)
        head = result.get_response()
        assert (head.model_name, head.model_version, head.id) == ("fake", "1", "7")
        assert tuple(output.name for output in head.outputs) == OUTPUTS
        for name in OUTPUTS:
            np.testing.assert_array_equal(result.as_numpy(name), given[name])


def main(address: str, expected: str) -> None:
    given = np.load(expected)
    with triton.InferenceServerClient(address) as client:
        find_server_and_model(client)
        infer(client, given)


if __name__ == "__main__":
    main(*sys.argv[1:])
