"""A model file at work: pixels in, embeddings out; the one place where ONNX Runtime is used."""

import logging
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from serving.cores import usable_cores
from serving.errors import BadArtifact, BadSetting, InvalidArgument, Overloaded, cause_of
from serving.model.preprocess import preprocess
from serving.model.provider import EXTRAS, GPUS, NAMES, Provider, set_up
from serving.model.spec import ModelSpec, keep_outputs, output_names, read_model

__all__ = ["CPU_FLAGS", "Encoder", "cpu_flags", "offered_providers"]

CPU_FLAGS: Final = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8")
"""Which kernels ONNX Runtime takes in int8, and so what comes out, depends on these."""
_CPU: Final = Path("/proc/cpuinfo")
_log = logging.getLogger(__name__)

_INPUT: Final = "images"
_EMBEDDINGS: Final = "embeddings"
_LACKS: Final = {
    "openvino": "its libraries could not be loaded",
    "cuda": "it found no GPU, or a CUDA or cuDNN of another version",
    "tensorrt": "it found no GPU, or no TensorRT, CUDA or cuDNN of the version that it needs",
}
_OUT_OF_MEMORY: Final = ("allocate", "out of memory", "bad_alloc", "bad allocation")


class Encoder:
    """One loaded model; all methods may be called from several threads at once."""

    def __init__(self, path: Path | str, *, threads: int = 0, provider: Provider = "cpu") -> None:
        """Read, prove and load an ONNX file, as `read_model` does; of several GPUs the first one runs it.

        So many threads compute one batch; 0 takes one for each core that this process may use. BadSetting
        tells that ONNX Runtime or the provider is not there.
        """
        self.spec: ModelSpec
        self._path = Path(path)
        self._data, self.spec = read_model(self._path)
        self.provider = provider
        self.on_gpu = provider in GPUS
        self.threads = threads or usable_cores()
        self._runtime = _onnxruntime()
        self._outputs = output_names(self._data)
        self._sessions: dict[tuple[frozenset[str], int], Any] = {}
        self._loading = threading.Lock()
        self._check(self._session((_EMBEDDINGS,), self.threads))
        measured, here = self.spec.cpu_flags, cpu_flags()
        if measured is not None and not self.on_gpu and measured != here:
            _log.warning(
                "%s was measured in int8 on a CPU with %s, and this one has %s: embeddings differ somewhat,"
                " and more where one lacks VNNI; measure it here by crossbatch evaluate, or export it here",
                self._path, " ".join(measured) or "none of its flags", " ".join(here) or "none of them",
            )  # fmt: skip

    def encode(self, images: NDArray[np.uint8], *, threads: int = 0) -> NDArray[np.float32]:
        """Embed a batch uint8 (B, S, S, 3) as float32 (B, d), rows of unit length; see `run`."""
        embeddings: NDArray[np.float32] = self.run(images, _EMBEDDINGS, threads=threads)[_EMBEDDINGS]
        return embeddings

    def run(self, images: NDArray[np.uint8], *outputs: str, threads: int = 0) -> dict[str, NDArray[Any]]:
        """Compute the named outputs, and only the nodes that they need; all that there are if none is named.

        Args:
            images: uint8 (B, S, S, 3), RGB, B at least 1, as `preprocess` gives them.
            outputs: `embeddings` float32 (B, d), `histograms` float32 (B, m), `assignments` uint8 (B, h, w).
            threads: 0 takes those that were said at first; another number loads the model a second time.

        Raises:
            InvalidArgument: `images` has another shape or dtype, or the model has no such output.
            Overloaded: The batch does not fit into memory.
            BadArtifact: The graph fails on it.
        """
        size = self.spec.image_size
        if images.dtype != np.uint8 or images.shape[1:] != (size, size, 3) or not len(images):
            raise InvalidArgument(
                f"the model {self.spec.name} takes images as uint8 (B, {size}, {size}, 3) with B at least 1, "
                f"and was given {images.dtype} {images.shape}"
            )
        for name in outputs:
            if name not in self._outputs:
                raise InvalidArgument(
                    f"the model {self.spec.name} has no output {name!r}; it has {', '.join(self._outputs)}"
                )
        names = outputs or self._outputs
        session = self._session(names, threads or self.threads)
        try:
            found = session.run(list(names), {_INPUT: np.ascontiguousarray(images)})
        except Exception as error:  # ONNX Runtime raises a dozen classes of its own
            reason = cause_of(error)
            if isinstance(error, MemoryError) or any(word in reason.lower() for word in _OUT_OF_MEMORY):
                raise Overloaded(
                    f"there is no memory for a batch of {len(images)} images: {reason}; send fewer at once"
                ) from error
            raise BadArtifact(
                f"the model {self.spec.name} fails on a batch of {len(images)} images: {reason}"
            ) from error
        return dict(zip(names, found, strict=True))

    def preprocess(self, data: bytes) -> NDArray[np.uint8]:
        """Decode one image file as this model wants it: uint8 (S, S, 3), RGB; see `preprocess`."""
        spec = self.spec
        return preprocess(
            data, size=spec.image_size, crop_fraction=spec.crop_fraction, resampling=spec.resampling
        )

    def _session(self, outputs: Collection[str], threads: int) -> Any:
        """Return the session that computes those outputs and nothing else, loading it the first time."""
        key = (frozenset(outputs), threads)
        if key not in self._sessions:
            with self._loading:  # which none waits for whose session is there
                if key not in self._sessions:
                    self._sessions[key] = self._load(keep_outputs(self._data, key[0]), threads)
        return self._sessions[key]

    def _load(self, data: bytes, threads: int) -> Any:
        options = self._runtime.SessionOptions()
        # Explicit, since the count found by itself fails in containers (onnxruntime#8313).
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.execution_mode = self._runtime.ExecutionMode.ORT_SEQUENTIAL
        # A thread that spins while it waits takes the core from decoding and gRPC (onnxruntime#17011).
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 3  # errors; it writes to standard error past Python's logging
        name = NAMES[self.provider]
        if name not in (offered := self._runtime.get_available_providers()):
            raise BadSetting(
                f"the provider {self.provider} was asked for, and the installed ONNX Runtime offers"
                f" {', '.join(offered)}; install crossbatch[{EXTRAS[self.provider]}] in place of"
                " the other extras that bring ONNX Runtime, or choose another provider"
            )
        providers = set_up(self.provider, threads=threads, cores=self.threads)
        try:
            session = self._runtime.InferenceSession(data, options, providers=providers)
        except Exception as error:
            raise BadArtifact(f"{self._path} cannot be loaded by ONNX Runtime: {cause_of(error)}") from error
        # A provider that fails to start is left out without an error (onnxruntime#23372).
        if name not in session.get_providers():
            raise BadSetting(
                f"the provider {self.provider} was asked for, and ONNX Runtime could not start it: "
                f"{_LACKS[self.provider]}; mend that, or choose another provider"
            )
        return session

    def _check(self, session: Any) -> None:
        """Refuse a graph whose ports are not those that the spec tells of."""
        spec = self.spec
        takes = [(port.name, port.type, list(port.shape[1:])) for port in session.get_inputs()]
        gives = [(port.name, port.type, list(port.shape[1:])) for port in session.get_outputs()]
        images = [(_INPUT, "tensor(uint8)", [spec.image_size, spec.image_size, 3])]
        if takes != images or gives != [(_EMBEDDINGS, "tensor(float)", [spec.dimension])]:
            raise BadArtifact(
                f"{self._path} does not fit its ModelSpec: it takes {takes} and gives {gives}, where images "
                f"uint8 (B, {spec.image_size}, {spec.image_size}, 3) and embeddings float32 "
                f"(B, {spec.dimension}) are needed; export it again"
            )


def offered_providers() -> list[Provider]:
    """Tell which providers the installed ONNX Runtime has, whether or not their devices are there."""
    offered = _onnxruntime().get_available_providers()
    return [provider for provider, name in NAMES.items() if name in offered]


def cpu_flags() -> tuple[str, ...]:
    """Tell which of `CPU_FLAGS` this machine has; none where Linux on x86 does not say."""
    try:
        lines = _CPU.read_text().splitlines()
    except OSError:
        return ()
    found = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return tuple(flag for flag in CPU_FLAGS if flag in found)


def _onnxruntime() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise BadSetting(
            "ONNX Runtime is not installed; install crossbatch[cpu], or crossbatch[gpu] for an NVIDIA GPU"
        ) from error
    return onnxruntime
