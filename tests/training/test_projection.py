"""The projection: against the singular value decomposition, and where there is nothing to see."""

import numpy as np
import pytest
import torch

from training.report.projection import project


@pytest.mark.parametrize("shape", [(40, 6), (6, 40), (2, 3), (3, 2)])
def test_principal_components_of_unit_vectors(shape: tuple[int, int]) -> None:
    vectors = np.random.default_rng(0).normal(size=shape) * 7 + 1
    found = project(torch.from_numpy(vectors))
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    u, s, axes = np.linalg.svd(unit - unit.mean(axis=0), full_matrices=False)
    for axis in range(2):
        share = s[axis] ** 2 / (s**2).sum()
        assert found.explained[axis] == pytest.approx(share, abs=1e-9)
        if share > 1e-9:
            sign = np.sign(axes[axis][np.abs(axes[axis]).argmax()])
            np.testing.assert_allclose(found.points[:, axis], sign * s[axis] * u[:, axis], atol=1e-9)
        else:
            np.testing.assert_allclose(found.points[:, axis], 0, atol=1e-6)


def test_the_same_picture_each_time() -> None:
    vectors = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    assert (project(vectors).points == project(vectors.clone()).points).all()


def test_no_variance() -> None:
    found = project(torch.ones(5, 3))
    assert found.explained == (0, 0)
    np.testing.assert_allclose(found.points, np.zeros((5, 2)), atol=1e-6)
    assert project(torch.ones(1, 3)).points.shape == (1, 2)
