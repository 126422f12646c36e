"""From a training Program to the test Program: the same names, nothing dropped, nothing learned."""

from __future__ import annotations

from onward.core.program import Program
from onward.core.transform import recipe_of
from onward.derive.backward import append_backward
from onward.derive.update.update import append_update


def for_test(program: Program) -> Program:
    """The forward Program as it is when nothing is trained, over the same Variables.

    The function is traced again with ``training=False``: dropout drops nothing, batch normalization uses the
    statistics it has. Backward and update are left away, with every transform that came after them.

    Raises:
        RecipeError: the Program was not traced, or its ops were changed by hand.

    Example:
        >>> import onward as ow
        >>> def network():
        ...     x = ow.layer.dropout(ow.data("x", (None, 8)), 0.5)
        ...     return ow.layer.mse(ow.layer.fc(x, 1), ow.data("y", (None, 1)))
        >>> program = ow.SGD(0.1).minimize(ow.trace(network))
        >>> [v.name for v in program.state]
        ['key', 'fc_0/w', 'fc_0/b', 'learning_rate', 'step']
        >>> [v.name for v in for_test(program).state]
        ['fc_0/w', 'fc_0/b']
    """
    recipe = recipe_of(program, "as a test Program", "Trace the network with training=False")
    test = recipe.origin.for_test()
    for step in recipe.steps:
        if step.function in (append_backward, append_update):
            break
        test = step.function(test, *step.arguments, **step.options)
    return test
