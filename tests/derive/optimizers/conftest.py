"""Optimizers are tested on a few numbers: what is compiled runs for a moment only."""

import pytest
from tests.derive.optimizers.fast import compiled_fast


@pytest.fixture(autouse=True, scope="module")
def fast():
    with compiled_fast():
        yield
