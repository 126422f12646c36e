"""From a training Program to the test Program: the same names, nothing dropped, nothing learned."""

from __future__ import annotations

import warnings

from onward.core.check import expect_program
from onward.core.jaxprs.drawing import draws
from onward.core.partitioned import partitioned
from onward.core.program import Phase, Program
from onward.core.recipe import recipe_of, with_steps
from onward.core.source import user_level
from onward.core.walk import ancestors, descendants


def for_test(program: Program) -> Program:
    """The forward Program as it is when nothing is trained, over the same Variables.

    The function is traced again with ``training=False``: dropout drops nothing, batch normalization uses the
    statistics it has. Backward and update are left away, with every transform that came after them but
    ``partition``.
    A function that calls layers of another library tells them, by ``onward.is_training()``; where it draws
    random numbers, or normalizes by its own batch as in training, and never asks, a warning says so.

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
    expect_program(program, "for_test")
    test = quietly_for_test(program)
    warn_of_training(program, test)
    return test


def quietly_for_test(program: Program) -> Program:
    """The same without a word: for what may never be asked to evaluate."""
    recipe = recipe_of(program, "as a test Program", "Trace the network with training=False")
    steps = (*recipe.until(Phase.BACKWARD).steps, *recipe.of(partitioned))
    return with_steps(recipe.origin.for_test(), steps)


def warn_of_training(program: Program, test: Program) -> None:
    """Warn of a function that goes on as in training in the test Program, for it never asks."""
    asks = test.recipe is None or test.recipe.origin.asks_training
    found = None if asks else _drawing(test) or _normalizing(program)
    if found is None:
        return
    warnings.warn(
        f"The test Program of {test.name} {found}, as in training: it never asks onward.is_training(). A "
        "layer of another library does not know what is traced. Tell it: train=ow.is_training() for flax "
        "linen, is_training=ow.is_training() for haiku, eqx.nn.inference_mode(model, not "
        "ow.is_training()) for equinox, `if not ow.is_training(): model.eval()` behind nnx.merge.",
        stacklevel=user_level(),
    )


def _drawing(test: Program) -> str | None:
    drawing = next((op for op in test.ops if draws(op.body)), None)
    return None if drawing is None else f"draws random numbers ({drawing.type}{drawing.at})"


def _normalizing(program: Program) -> str | None:
    """Batch normalization: what the loss reads of a batch is averaged in state that it does not read."""
    read = ancestors(program, program.loss) if program.loss is not None else set()
    made = {v for op in program.ops for v in op.outputs}
    later = descendants(program, [gradient for _, gradient in program.gradients])
    for old, new in program.next_state.items():
        if old.shape and old not in read and new not in later:
            behind = ancestors(program, new) - read
            edge = {v for op in program.ops if not behind.isdisjoint(op.outputs) for v in op.inputs} & read
            if any(v.shape == old.shape and v in made for v in edge):
                return f"normalizes by the batch that it is given, and does not read {old.name!r}"
    return None
