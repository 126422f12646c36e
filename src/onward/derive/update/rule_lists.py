"""Lists of rules: what may stand in one, and one order for several.

>>> import onward as ow
>>> clip, decay, average = ow.ClipByValue(1.0), ow.L2(0.1), ow.EMA(0.9)
>>> [rule.name for rule in in_order([[clip, average], [decay, average], [clip, decay]])]
['clip_by_value', 'l2', 'ema']
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from onward.core.errors import HyperparameterError
from onward.core.structure import describe
from onward.core.walk import Where, listed, name_of
from onward.derive.rule import GradientRule, ParameterRule, Rule


def shown_rules(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """The rules as an optimizer keeps them.

    Raises:
        HyperparameterError: something that is not a rule, or the same one twice.
    """
    found = tuple(rules) if isinstance(rules, list | tuple) else (rules,)
    for i, rule in enumerate(found):
        if not isinstance(rule, GradientRule | ParameterRule):
            raise HyperparameterError(
                f"rules holds {describe(rule)}; expected gradient rules and parameter rules, such as "
                "[ClipByGlobalNorm(1.0), WeightDecay(0.01)]."
            )
        if rule.where is not None:
            choices(type(rule).__name__, rule.where)
        if any(rule == other for other in found[:i]):
            raise HyperparameterError(f"rules holds {rule!r} twice. Give each rule once, or other values.")
    return found


def choices(what: str, where: Any) -> tuple[Where, ...]:
    """The names, patterns and predicates that pick parameters.

    Raises:
        HyperparameterError: none at all, or something that is neither.
    """
    found = tuple(listed(where)) if isinstance(where, Iterable) else (where,)
    wrong = [choice for choice in found if name_of(choice) is None and not callable(choice)]
    if wrong or not found:
        raise HyperparameterError(
            f"{what} was given {wrong[0] if wrong else where!r} to pick its parameters with; expected a "
            "name, a pattern such as 'layers/*/b', or a predicate of a Variable."
        )
    return found


def distinct(rules: Sequence[Rule]) -> list[Rule]:
    """Rules, each once; compared, for they need not be hashable."""
    found: list[Rule] = []
    for rule in rules:
        if not any(rule == other for other in found):
            found.append(rule)
    return found


def in_order(lists: Sequence[Sequence[Rule]]) -> list[Rule]:
    """One order of the rules of all lists that is the order in each of them.

    Raises:
        HyperparameterError: two lists contradict each other.
    """
    left = [list(rules) for rules in lists if rules]
    found: list[Rule] = []
    while left:
        heads = [rules[0] for rules in left]
        free = [head for head in heads if not any(head == later for rules in left for later in rules[1:])]
        if not free:
            raise HyperparameterError(
                f"Two groups have the rules {heads[0]!r} and {heads[1]!r} in different orders. Use one order."
            )
        found.append(free[0])
        left = [[r for r in rules if r != free[0]] for rules in left]
        left = [rules for rules in left if rules]
    return found
