"""Permits count inputs and bytes, are always given back, and a refusal tells when to return."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.errors import Draining, Overloaded
from serving.rpc.gate.admission import Admission

WAYS: dict[str, Callable[[Admission, int], AbstractContextManager[None]]] = {
    "inputs": Admission.admit,
    "bytes": Admission.receive,
}


@pytest.mark.parametrize("way", WAYS)
@given(limit=st.integers(1, 50), calls=st.lists(st.integers(1, 60), max_size=20))
def test_what_is_in_flight_never_passes_the_limit_and_all_permits_come_back(
    way: str, limit: int, calls: list[int]
) -> None:
    admission = Admission(limit, limit)
    open_calls = []
    refusals: list[Overloaded] = []
    for wanted in calls:
        held = getattr(admission, way)
        permit = WAYS[way](admission, wanted)
        try:
            permit.__enter__()
        except Overloaded as error:
            refusals.append(error)
            assert held + wanted > limit
        else:
            open_calls.append(permit)
            assert getattr(admission, way) == held + wanted <= limit
    for permit in open_calls:
        permit.__exit__(None, None, None)
    assert getattr(admission, way) == 0
    assert all(0.05 <= each.retry_after <= 5 for each in refusals)


def test_one_call_with_many_images_cannot_pass_by_the_limit() -> None:
    admission = Admission(10)
    with admission.admit(8), pytest.raises(Overloaded, match="8 of at most 10 inputs"), admission.admit(3):
        pass


def test_one_call_with_many_bytes_cannot_pass_by_the_limit() -> None:
    admission = Admission(10, 5_000)
    with (
        admission.receive(4_000),
        pytest.raises(Overloaded, match="4,000 of at most 5,000 bytes"),
        admission.receive(1_001),
    ):
        pass


@pytest.mark.parametrize("way", WAYS)
def test_a_failing_call_gives_its_permits_back(way: str) -> None:
    admission = Admission(10)
    with pytest.raises(RuntimeError), WAYS[way](admission, 10):
        raise RuntimeError
    assert getattr(admission, way) == 0


def test_a_draining_server_receives_nothing_and_lets_what_runs_go_on() -> None:
    admission = Admission(10)
    with admission.receive(1):
        admission.draining = True
        with admission.admit(1):
            pass
    with pytest.raises(Draining), admission.receive(1):
        pass


@pytest.mark.parametrize("limits", [(0, 1), (1, 0)])
def test_a_limit_below_one_is_refused(limits: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="admits nothing"):
        Admission(*limits)
