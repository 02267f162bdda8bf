"""What `crossbatch serve` can be told."""

from pathlib import Path
from typing import Literal, Self

from pydantic import AnyHttpUrl, BaseModel, ConfigDict, Field, model_validator

from serving.gallery.address import Place
from serving.model.provider import ProviderChoice
from serving.rpc.limits import DEFAULT_PORT, MAX_INPUTS

__all__ = ["Settings"]


class Settings(BaseModel):
    """What `crossbatch serve` can be told."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    model: tuple[str, ...] = Field(min_length=1)
    """ONNX file written by `crossbatch export`, NAME=FILE to serve it by another name, or a folder: every
    *.onnx in it, by the file's name without .onnx. May be given several times; where a call names no model,
    the first one is meant."""
    galleries: Place
    """Folder that holds the galleries, each a folder in it, made with the first one; or a Milvus, as
    milvus://HOST:19530."""
    host: str = "127.0.0.1"
    """Address to listen on; off loopback it needs TLS or --insecure. 0.0.0.0 is every address of IPv4, and ::
    those of IPv6 as well."""
    port: int = Field(DEFAULT_PORT, ge=0, le=65_535)
    """Port to listen on; 0 for a free one."""
    insecure: bool = False
    """Allow plain text to and from other machines, keys too."""
    tls_certificate: Path | None = None
    """PEM file with the server's certificate chain; read again when it changes."""
    tls_key: Path | None = None
    """PEM file with that certificate's private key."""
    tls_client_ca: Path | None = None
    """PEM file with the authorities whose certificates clients must show (mutual TLS)."""
    keys: Path | None = None
    """File of API keys made by `crossbatch keys`; every call must then bring one. Read again when it
    changes."""
    audit_log: Path | None = None
    """File that gets a line for each write, beside the log."""
    workers: int = Field(1, ge=1, le=256)
    """Processes that share the port and the galleries."""
    max_connection_age: float = Field(60.0, ge=1, le=86_400)
    """Seconds after which a client is asked to connect anew, so that workers and replicas started later get
    their share; no call fails of it."""
    provider: ProviderChoice = "cpu"
    """What runs the models; must then be there. auto: the fastest that gives the CPU's embeddings to 1e-4."""
    search_device: Literal["cpu", "cuda"] = "cpu"
    """Where galleries are searched; a GPU, which must then be there, compares every vector."""
    threads: int = Field(0, ge=0, le=1_024)
    """Cores that images are decoded and embedded on; 0 takes all, shared among the workers."""
    decode_threads: int = Field(0, ge=0, le=1_024)
    """Threads that decode images for a GPU; 0 takes one a core, shared among the workers."""
    max_batch: int = Field(0, ge=0, le=1_024)
    """Most images in one run of a model; 0 takes 32 on a GPU, and on a CPU by the model's image size: 2 at
    224 pixels, 8 at 128."""
    max_wait_ms: float = Field(0.0, ge=0, le=1_000)
    """Longest time in milliseconds that an image waits for others to join it."""
    max_in_flight: int = Field(512, ge=MAX_INPUTS, le=65_536)
    """Most images, queries and items on their way at once in a worker; more are refused."""
    max_in_flight_per_client: int = Field(0, ge=0, le=65_536)
    """Most of them for one API key, 256 at least; 0 sets no limit beside the common one."""
    grace: float = Field(10.0, ge=0, le=3_600)
    """Seconds that calls have to finish after SIGTERM or Ctrl-C."""
    drain_delay: float = Field(0.0, ge=0, le=3_600)
    """Seconds before that in which health says NOT_SERVING and calls are still taken, for load balancers to
    notice."""
    metrics_port: int | None = Field(None, ge=0, le=65_535)
    """Port for Prometheus, at /metrics; 0 for a free one. None by default."""
    metrics_host: str = "127.0.0.1"
    """Address that the metrics are served on; they are plain text."""
    web_port: int | None = Field(None, ge=0, le=65_535)
    """Port for the page to look at galleries and search in them, and for JSON over HTTP; 0 for a free one.
    None by default."""
    web_host: str = "127.0.0.1"
    """Address that the page is served on; off loopback it needs TLS or --insecure."""
    trace: AnyHttpUrl | None = None
    """URL of an OpenTelemetry collector (OTLP over HTTP) that traces are sent to."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least severe log line that is written to standard error."""
    log_calls: Literal["some", "all"] = "some"
    """Calls that have a line: some, each error and of what went well the first ten a second of each kind; or
    all."""

    @model_validator(mode="after")
    def _fit(self) -> Self:
        if self.search_device != "cpu" and isinstance(self.galleries, str):
            raise ValueError("--search-device is for galleries in a folder; a Milvus searches where it runs")
        if (self.tls_certificate is None) != (self.tls_key is None):
            given, lacks = ("--tls-key", "--tls-certificate")[:: 1 if self.tls_key else -1]
            raise ValueError(f"{given} was given without {lacks}; give both or neither")
        if self.tls_client_ca and not self.tls_certificate:
            raise ValueError("--tls-client-ca needs --tls-certificate and --tls-key; give all three or none")
        if self.tls_client_ca and self.web_port is not None:
            raise ValueError(
                "--web-port cannot be had with --tls-client-ca: the page has no certificate to show to the "
                "server; leave one of them out, and use --keys"
            )
        if self.max_in_flight_per_client:
            if not self.keys:
                raise ValueError("--max-in-flight-per-client tells clients by their keys; give --keys too")
            if self.max_in_flight_per_client < MAX_INPUTS:
                raise ValueError(
                    f"--max-in-flight-per-client {self.max_in_flight_per_client} never admits a call of "
                    f"{MAX_INPUTS} inputs; give at least {MAX_INPUTS}, or 0 for no limit"
                )
        return self
