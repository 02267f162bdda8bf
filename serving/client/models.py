"""The models that are served, and whether they are."""

import time

from grpc_health.v1 import health_pb2

from protos import model_service_pb2 as pb
from serving.client.answers import ModelInfo, Reloaded, model_info_of
from serving.client.given import text
from serving.client.step import Call, Pause, Plan
from serving.errors import CrossbatchError, InvalidArgument

__all__ = ["get_model", "list_models", "ready", "reload_models"]

_PAUSE = 0.05


def get_model(name: str) -> Plan[ModelInfo]:
    """Describe one model.

    Raises:
        CrossbatchError: if the call fails.
    """
    reply = yield Call(pb.GetModelRequest(name=text(name, "name")))
    return model_info_of(reply.model)


def list_models() -> Plan[list[ModelInfo]]:
    """Describe every model, the first one first.

    Raises:
        CrossbatchError: if the call fails.
    """
    reply = yield Call(pb.ListModelsRequest())
    return [model_info_of(model) for model in reply.models]


def reload_models(timeout: float) -> Plan[Reloaded]:
    """Have the server look at its models and galleries again.

    Raises:
        CrossbatchError: if the call fails.
    """
    reply = yield Call(pb.ReloadModelsRequest(), timeout=timeout)
    return Reloaded(
        tuple(model_info_of(model) for model in reply.models), tuple(reply.loaded), tuple(reply.removed)
    )


def ready(wait: float) -> Plan[bool]:
    """Ask whether the server serves, for `wait` seconds at the most."""
    deadline = time.monotonic() + wait
    while True:
        try:
            asking = Call(health_pb2.HealthCheckRequest(), timeout=max(1.0, min(wait, 5.0)), retries=0)
            serving: bool = (yield asking).status == health_pb2.HealthCheckResponse.SERVING
        except InvalidArgument:  # the client cannot ask, today or later
            return False
        except CrossbatchError:  # whatever it is, it is not an answer
            serving = False
        if serving or time.monotonic() >= deadline:
            return serving
        yield Pause(_PAUSE)
