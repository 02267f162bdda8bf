"""Permits count inputs, are always given back, and a refusal tells when to return."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.errors import Draining, InvalidArgument, Overloaded
from serving.rpc.admission import Admission


@given(limit=st.integers(1, 50), calls=st.lists(st.integers(1, 60), max_size=20))
def test_inputs_in_flight_never_pass_the_limit_and_all_permits_come_back(
    limit: int, calls: list[int]
) -> None:
    admission = Admission(limit)
    open_calls = []
    refusals: list[Overloaded] = []
    for inputs in calls:
        held = admission.in_flight
        permit = admission.admit(inputs)
        try:
            permit.__enter__()
        except InvalidArgument:
            assert inputs > limit
        except Overloaded as error:
            refusals.append(error)
            assert held + inputs > limit
        else:
            open_calls.append(permit)
            assert admission.in_flight == held + inputs <= limit
    for permit in open_calls:
        permit.__exit__(None, None, None)
    assert admission.in_flight == 0
    assert all(0.05 <= each.retry_after <= 5 for each in refusals)


def test_one_call_with_many_images_cannot_pass_by_the_limit() -> None:
    admission = Admission(10)
    with admission.admit(8), pytest.raises(Overloaded, match="8 of at most 10"), admission.admit(3):
        pass
    with pytest.raises(InvalidArgument, match="at most 10 at a time"), admission.admit(11):
        pass


def test_a_failing_call_gives_its_permits_back() -> None:
    admission = Admission(10)
    with pytest.raises(RuntimeError), admission.admit(10):
        raise RuntimeError
    assert admission.in_flight == 0


def test_a_draining_server_admits_nothing() -> None:
    admission = Admission(10)
    admission.draining = True
    with pytest.raises(Draining), admission.admit(1):
        pass


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="admits nothing"):
        Admission(0)
