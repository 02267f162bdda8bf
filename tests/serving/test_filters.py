"""Filters as they travel: whatever goes in comes out, and what is malformed is refused."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos import retrieval_service_pb2 as pb
from serving.errors import InvalidArgument
from serving.gallery.search.filter import AllOf, AnyOf, Equal, Exists, Filter, In, Not, Range
from serving.rpc.filters import filter_message, filter_of
from serving.rpc.limits import MAX_FILTER_CONDITIONS, MAX_FILTER_LEVELS

names = st.text("abc$\0é😀", max_size=8)
numbers = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**53), 2**53)
values = names | st.booleans() | numbers
bounds = st.sampled_from([st.text(max_size=4), numbers]).flatmap(
    lambda bound: st.tuples(*[st.none() | bound] * 4).filter(
        lambda four: any(each is not None for each in four)
    )
)
ranges = st.builds(lambda name, four: Range(name, *four), names, bounds)
filters = st.recursive(
    st.builds(Equal, names, values)
    | st.builds(In, names, st.lists(values, max_size=4).map(tuple))
    | st.builds(Exists, names)
    | ranges,
    lambda inner: (
        st.builds(AllOf, st.lists(inner, max_size=3).map(tuple))
        | st.builds(AnyOf, st.lists(inner, max_size=3).map(tuple))
        | st.builds(Not, inner)
    ),
    max_leaves=8,
)


@settings(max_examples=60)
@given(filters)
def test_a_filter_comes_back_as_it_was(condition: Filter) -> None:
    data = filter_message(condition).SerializeToString()
    back = filter_of(pb.Filter.FromString(data))
    assert back == condition
    told = [repr(each).count("True") + repr(each).count("False") for each in (back, condition)]
    assert told[0] == told[1]  # since True == 1 == 1.0


value = pb.Filter.Value(number=1)


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (pb.Filter(), "is empty; give equal"),
        (pb.Filter(any_of=pb.Filter.Several(filters=[pb.Filter()])), "is empty; give equal"),
        (pb.Filter(equal=pb.Filter.Equal(field="a")), "lacks a value"),
        (pb.Filter(among=pb.Filter.Among(field="a", values=[value, pb.Filter.Value()])), "lacks a value"),
        (pb.Filter(range=pb.Filter.Range(field="a")), "without bounds on the field 'a'"),
        (pb.Filter(range=pb.Filter.Range(field="a", most=pb.Filter.Value())), "lacks a value"),
        (
            pb.Filter(range=pb.Filter.Range(field="a", most=pb.Filter.Value(boolean=True))),
            "boolean; expected all numbers",
        ),
        (pb.Filter(range=pb.Filter.Range(above=pb.Filter.Value(number=float("nan")))), "finite"),
        (pb.Filter(equal=pb.Filter.Equal(value=pb.Filter.Value(number=float("inf")))), "finite"),
        (pb.Filter(among=pb.Filter.Among(values=[value] * (MAX_FILTER_CONDITIONS + 1))), "more than 1000"),
        (
            pb.Filter(all_of=pb.Filter.Several(filters=[pb.Filter(any_of=pb.Filter.Several())] * 1_001)),
            "more than 1000",
        ),
        (pb.Filter(among=pb.Filter.Among(values=[pb.Filter.Value()] * 300_000)), "fewer or shorter"),
    ],
)
def test_a_malformed_filter_is_refused(message: pb.Filter, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        filter_of(message)


def test_a_filter_has_so_many_levels_and_parts_at_most() -> None:
    deepest: Filter = Exists("a")
    for _ in range(MAX_FILTER_LEVELS - 1):
        deepest = AllOf((deepest,))
    sent = pb.SearchRequest(filter=filter_message(deepest)).SerializeToString()
    assert filter_of(pb.SearchRequest.FromString(sent).filter) == deepest  # Protocol Buffers read it, too
    with pytest.raises(InvalidArgument, match="more than 30 levels"):
        filter_of(pb.Filter(negated=filter_message(deepest)))
    largest = Not(In("a", tuple(range(MAX_FILTER_CONDITIONS))))
    assert filter_of(filter_message(largest)) == largest
    with pytest.raises(InvalidArgument, match="more than 1000"):
        filter_message(AllOf((largest, Exists("b"))))


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (Not, (5,)), (Not, (None,)), (AllOf, (5,)), (AnyOf, ((None,),)), (AnyOf, (Exists("a"),)), (dict, ()),
        (Equal, (5, 1)), (Equal, ("\udcff", 1)), (Equal, ("a", "\udcff")), (Equal, ("a", None)),
        (Equal, ("a", b"1")), (Equal, ("a", [1])), (Equal, ("a", 1j)), (Equal, ("a", float("nan"))),
        (Equal, ("a", 10**400)), (In, ("a", (1, None))), (In, ("a", 5)), (In, ("a", "b")), (Exists, (5,)),
        (Range, ("a",)), (Range, ("a", 1, "b")), (Range, ("a", float("inf"))), (Range, (None, 1)),
    ],
)  # fmt: skip
def test_what_is_no_filter_is_not_sent(kind: Any, fields: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidArgument):
        filter_message(kind(*fields))
