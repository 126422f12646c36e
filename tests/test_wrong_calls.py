"""Wrong calls: each is answered by an error that Onward raises on purpose, or by a result."""

from tests.torture.wrong_calls import wrong_calls

COUNT = 2000


def test_a_wrong_argument_is_a_named_error_or_a_result():
    made = list(wrong_calls(COUNT))
    raw = [f"{call}: {type(error).__name__}: {error}" for call, error in made if error is not None]
    assert len(made) == COUNT
    assert not raw, "\n".join(raw)
