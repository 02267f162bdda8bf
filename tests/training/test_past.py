"""The past by class against sums over all images so far, image by image."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.errors import BadSetting
from training.method.past import Past


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=6), max_size=4),
    st.sets(st.integers(0, 4)),
    st.sampled_from([0.5, 0.9, 1.0]),
)
def test_the_sums_are_those_of_every_image_of_another_class(
    steps: list[list[int]], own: set[int], decay: float
) -> None:
    past, draw = Past(5, 3, 2, decay=decay), np.random.default_rng(0)
    gram, moment = np.zeros((3, 3)), np.zeros((3, 2))
    for labels in steps:
        z, y = draw.random((len(labels), 3)), draw.standard_normal((len(labels), 2))
        past.push(torch.tensor(z).float(), torch.tensor(y).float(), torch.tensor(labels))
        for i, label in enumerate(labels):
            if label not in own:
                gram += np.outer(z[i], z[i])
                moment += np.outer(z[i], y[i])
        gram, moment = decay * gram, decay * moment
    found = past.without(torch.tensor(sorted(own), dtype=torch.int64))
    np.testing.assert_allclose(found[0].numpy(), gram, atol=1e-5)
    np.testing.assert_allclose(found[1].numpy(), moment, atol=1e-5)


@pytest.mark.parametrize("decay", [0.0, 1.1])
def test_a_decay_out_of_its_range_is_refused(decay: float) -> None:
    with pytest.raises(BadSetting, match="above 0 and at most 1"):
        Past(2, 3, 2, decay=decay)
