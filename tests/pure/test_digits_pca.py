"""The example's arithmetic, and that it tells a wrong answer from a right one. The demo runs it in a real job."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import dask
import numpy as np
import pytest

from support import ROOT

pytest.importorskip("sklearn")


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("digits_pca", ROOT / "examples" / "digits_pca.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def data() -> np.ndarray:
    from sklearn.datasets import load_digits

    return load_digits().data


def test_same_as_scikit_learn_and_wrong_answers_show(example: ModuleType, data: np.ndarray) -> None:
    with dask.config.set(scheduler="synchronous"):
        components, variance = example.principal_components(data, 10, 4, "CPU")
    assert components.shape == (10, 64)
    assert example.largest_error(data, components, variance) < 1e-10
    assert example.largest_error(data, -components, variance) < 1e-10  # the sign is nobody's
    assert example.largest_error(data, components[::-1], variance) > 0.1
    assert example.largest_error(data, components, variance * 1.01) > 0.009
    assert not example.largest_error(data, components * np.nan, variance) <= 1e-6
