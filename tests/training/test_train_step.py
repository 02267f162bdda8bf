"""The benchmark of the XML term's cost, in short: it takes real steps, and tells a figure for each case."""

from benchmarks.train_step import CASES, measure


def test_steps_with_and_without_the_term_are_timed_in_pairs() -> None:
    (case,) = CASES["small"]
    cost = measure(case.recipe, pairs=4)
    low, middle, high = cost.quartiles
    assert low <= middle <= high
    assert min(cost.seconds) > 0
    assert cost.loss < cost.first


def test_the_full_size_is_that_of_the_bounds() -> None:
    told = [(case.recipe.backbone, case.recipe.image_size, case.bound) for case in CASES["full"]]
    assert told == [("resnet50", 224, 0.02), ("resnet20", 32, 0.05), ("resnet20", 32, 0.05)]
    assert all(case.recipe.xml_weight > 0 for case in CASES["full"])
