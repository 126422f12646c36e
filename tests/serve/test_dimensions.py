"""Lengths as text get their values by arithmetic alone, whatever the text says."""

import pytest
from jax import export

from onward.serve.export.dimensions import evaluated, names_in, written


@pytest.mark.parametrize(
    "text",
    [
        "b",
        "4*b",
        "b + t",
        "2*b - 1",
        "floordiv(b, 2)",
        "mod(b, 3) + 1",
        "max(b, t)",
        "min(b, 3*t)",
        "b^2 + b*t",
    ],
)
def test_a_length_has_the_value_that_jax_gives_it(text):
    """JAX prints each in its own way; Python evaluates the same text."""
    *_, length = export.symbolic_shape(f"b, t, {text}")
    expected = eval(  # the text of this very file
        text.replace("^", "**").replace("floordiv(b, 2)", "b // 2").replace("mod(b, 3)", "b % 3"),
        {"b": 7, "t": 5, "max": max, "min": min},
    )
    assert evaluated(written(length), {"b": 7, "t": 5}) == expected


def test_plain_numbers_stay_numbers():
    assert (written(3), evaluated(3, {}), names_in(3)) == (3, 3, set())


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "b.real",
        "b[0]",
        "open('x')",
        "(lambda: 1)()",
        "b^9",
        "b^b",
        "9^8^8^8",
        "10000000000000000000000 * 10000000000000000000",
        "floordiv(b, 0)",
        "1.5",
        "True",
        "'b'",
        "",
        "b b",
        "c",
        "-b",
        "max(b)",
        "(" * 300,
        "b+" * 400 + "b",
    ],
)
def test_what_is_no_length_is_refused(text):
    with pytest.raises(ValueError):
        evaluated(text, {"b": 7})
