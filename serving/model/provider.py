"""What runs a model: ONNX Runtime's execution providers that can be asked for, and how each is set up."""

import json
from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias

__all__ = ["EXTRAS", "GPUS", "NAMES", "Provider", "ProviderChoice", "set_up"]

Provider: TypeAlias = Literal["cpu", "openvino", "cuda", "tensorrt"]
ProviderChoice: TypeAlias = Literal["auto", "cpu", "openvino", "cuda", "tensorrt"]

NAMES: Final[Mapping[Provider, str]] = {
    "cpu": "CPUExecutionProvider",
    "openvino": "OpenVINOExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
}
EXTRAS: Final[Mapping[Provider, str]] = {
    "cpu": "cpu", "openvino": "openvino", "cuda": "gpu", "tensorrt": "gpu",
}  # fmt: skip
"""The extra that brings each: all of them install one module, so only one of the three can be there."""
GPUS: Final = frozenset[Provider]({"cuda", "tensorrt"})


def set_up(provider: Provider, *, threads: int, cores: int) -> list[Any]:
    """Return what ONNX Runtime is to be given: a provider and, behind it, those for nodes that it lacks.

    `threads` compute one batch, on `cores` in all: so many batches run beside one another as these hold.
    """
    openvino = {
        "INFERENCE_PRECISION_HINT": "f32",  # or else bf16, up to 1.5e-2 away, where the processor has it
        "INFERENCE_NUM_THREADS": str(max(threads, cores)),
        "NUM_STREAMS": str(max(1, cores // threads)),  # with one, batches of several callers run in turn
        "ENABLE_CPU_PINNING": "NO",  # which ties the callers of each process to the same first cores
    }
    options: Mapping[Provider, dict[str, str]] = {
        "openvino": {"device_type": "CPU", "load_config": json.dumps({"CPU": openvino})},
        # The search for the fastest kernel is repeated for each new batch size, at 10 times a run's cost;
        # TF32 keeps 10 of 23 bits.
        "cuda": {"cudnn_conv_algo_search": "HEURISTIC", "use_tf32": "0"},
    }
    behind: Mapping[Provider, tuple[Provider, ...]] = {"cpu": (), "tensorrt": ("cuda", "cpu")}
    wanted = (provider, *behind.get(provider, ("cpu",)))
    return [(NAMES[each], options.get(each, {})) for each in wanted]
