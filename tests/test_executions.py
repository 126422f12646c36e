"""Some rows of the table of executions: one of each type of rule, and one that evaluates the loss again."""

import pytest
from tests.executions import LIMIT, WAYS, compared

REFUSED = {
    "Adam": {},
    "Muon": {"sharded": "per matrix"},
    "DoG": {"sharded": "across parameters"},
    "Sophia": {
        "sharded": "across parameters",
        "servers": "evaluates the loss in its update, and servers have no data",
        "accumulated": "evaluates the loss again on the batch",
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_five_executions_are_equal_or_refused_with_a_reason(name):
    cells = compared(name)
    assert set(cells) == set(WAYS)
    for way, value in cells.items():
        if way in REFUSED[name]:
            assert REFUSED[name][way] in value
        else:
            assert value < LIMIT, way
