"""Gradient transformations of optax, and all that is built like them, as optimizers.

Nothing of optax is needed for it: ``init`` and ``update`` are called, and what they trace to is an update
pass as every other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from onward.core.errors import ArgumentError, HyperparameterError, TraceError
from onward.core.jaxprs.equations import Type
from onward.core.program import Variable
from onward.core.structure import Signature, Structure, describe
from onward.core.words import UpdateType
from onward.define.trace import explaining
from onward.derive.optimizer import Optimizer
from onward.derive.rule import Rule
from onward.derive.update.apart import Apart, taken_apart
from onward.derive.update.groups import Group

Containers = tuple[list[str], Callable[[Sequence[Any]], Any]]


def from_optax(
    transformation: Any,
    *,
    name: str | None = None,
    rules: Sequence[Rule] = (),
    groups: Sequence[Group] = (),
    low_precision: str = "nearest",
    maximize: bool = False,
) -> Optimizer:
    """Make an optimizer of a gradient transformation of optax: any pair of ``init`` and ``update``.

    A step is ``w + u``, where ``update(gradients, state, parameters)`` returns ``u``: that of
    ``optax.apply_updates``. The transformation is given the parameters that are trained, in their own
    containers, with None where one is not; a complex gradient points uphill (the conjugate of that of
    ``jax.grad``).

    Its state is in the State by name: ``w/mu`` for what belongs to a parameter, ``scale_by_adam/count`` for
    what all share. What ``optax.inject_hyperparams`` made a hyperparameter is one here, changed without
    compiling. All other numbers are fixed when the Program is derived. Where the traced update looks at each
    parameter by itself it is one op for each, and if it looks at each number by itself, it can be cut into
    parts (``Sharded``, ``split``); otherwise it is one op across parameters.

    Args:
        transformation: what has ``init(parameters)`` and ``update(gradients, state, parameters)``.
        name: the type of its ops; found from the functions that it is made of unless given.
        rules: as of every optimizer.
        groups: as of every optimizer.
        low_precision: how parameters below float32 are updated: ``"nearest"`` in their own dtype, as optax
            does; ``"master"`` in float32, with a slot that keeps what their dtype cannot hold;
            ``"stochastic"`` in float32 and rounded at random.
        maximize: let the loss become larger.

    Raises:
        ArgumentError: no such pair; or, once it is traced, one that needs more than gradients, state and
            parameters, such as a line search, which needs the loss.
        TraceError: once it is traced, a pair that cannot be.

    Example:
        >>> import jax.numpy as jnp, onward as ow, optax
        >>> optimizer = ow.from_optax(optax.adam(0.1))
        >>> program = optimizer.minimize(lambda p: jnp.sum(p["w"] ** 2), {"w": jnp.ones(3)})
        >>> [v.name for v in program.state]
        ['w', 'step', 'scale_by_adam/count', 'w/mu', 'w/nu']
        >>> step = ow.compile(program)
        >>> state, out = step(step.init({"w": jnp.ones(3)}))
        >>> round(float(state.parameters["w"][0]), 3)
        0.9
    """
    return FromOptax(
        _Functions(transformation, name),
        rules=rules,
        groups=groups,
        low_precision=low_precision,
        maximize=maximize,
    )


class _Functions:
    """The two functions of a transformation, and words for it."""

    def __init__(self, transformation: Any, name: str | None) -> None:
        pair = [getattr(transformation, part, None) for part in ("init", "update")]
        if isinstance(transformation, type | Optimizer) or not all(map(callable, pair)):
            raise ArgumentError(_NO_PAIR.format(found=_found(transformation)))
        self.init: Callable[[Any], Any] = transformation.init
        self.update: Callable[[Any, Any, Any], tuple[Any, Any]] = transformation.update
        self.given, self.name = transformation, name
        self.words = tuple(dict.fromkeys(_words(self.update, set(), whole=True)))

    @property
    def kind(self) -> str:
        """The type of its ops: the first of its parts that does more than wrap or clip."""
        telling = (word for word in self.words if not _PLUMBING.fullmatch(word))
        return self.name or next(telling, "from_optax")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Functions) and (self.given, self.name) == (other.given, other.name)

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        shown = [w for w in self.words if w not in _SILENT]
        return ", ".join(shown) or type(self.given).__name__


class FromOptax(Optimizer):
    """An optimizer that a gradient transformation makes; see ``from_optax``.

    Source: Bradbury et al., JAX; DeepMind et al., The DeepMind JAX Ecosystem, 2020 (optax).
    """

    type: ClassVar[UpdateType] = UpdateType.ACROSS
    transformation: _Functions
    low_precision: str = field(default="nearest", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.slot_dtype is not None:
            raise HyperparameterError(
                "from_optax takes no slot_dtype: the transformation chooses the dtypes of its state, such as "
                "optax.adam(1e-3, mu_dtype=jnp.bfloat16)."
            )
        object.__setattr__(self, "_known", [])

    def __getstate__(self) -> dict[str, Any]:
        """All but the updates that were traced here: another process traces its own."""
        return {**vars(self), "_known": []}

    @property
    def name(self) -> str:
        """The type of its ops."""
        return self.transformation.kind

    @property
    def title(self) -> str:
        """Its name in sentences."""
        return f"from_optax({self.transformation!r})"

    def __repr__(self) -> str:
        return self.title

    def told(self, parameters: Sequence[Variable], signature: Signature | None) -> Self:
        """The optimizer whose update is traced for these parameters."""
        names, filled = _containers(parameters, signature)
        by_name = {p.name: p for p in parameters}
        types = [self._type(by_name[name]) for name in names]
        apart = self._apart(names, types, filled)
        made = object.__new__(type(self))
        vars(made).update(vars(self), apart=apart, type=apart.type)
        return made

    def _type(self, parameter: Variable) -> Type:
        """Shape and dtype in which the transformation is given a parameter and its gradient."""
        wide = jnp.promote_types(parameter.dtype, jnp.float32)
        return Type(parameter.shape, parameter.dtype if self.low_precision == "nearest" else wide)

    def _apart(self, names: list[str], types: list[Type], filled: Callable[[Sequence[Any]], Any]) -> Apart:
        """The update of these parameters; traced once."""
        known: list[tuple[Any, Apart]] = vars(self)["_known"]
        key = jax.tree.structure(filled(names)), names, [(t.shape, t.dtype) for t in types]
        for other, found in known:
            if other == key:
                return found
        f = self.transformation
        made = taken_apart(f.init, f.update, names, types, filled, self._explaining)
        known.append((key, made))
        return made

    def _explaining(self, function: Callable[..., Any]) -> Any:
        """Call what calls the transformation, and say what it lacks where it needs more than it is given."""
        try:
            return explaining(f"The update of {self}", function)
        except TraceError as error:
            if lacks := _lacking(str(error.__cause__)):
                raise ArgumentError(_NEEDS_MORE.format(what=self, lacks=lacks)) from error.__cause__
            raise


def _containers(parameters: Sequence[Variable], signature: Signature | None) -> Containers:
    """The names of parameters in the order of their containers, and how these are filled.

    Parameters that were traced in no containers are a dict by name.
    """
    mine = {p.name for p in parameters}
    structure = None if signature is None else signature.parameters
    if structure is None or not mine <= {v.name for v in structure.variables}:
        names = sorted(mine)
        return names, lambda values: dict(zip(names, values, strict=True))
    names = [v.name for v in structure.variables if v.name in mine]
    return names, lambda values: _filled(structure, dict(zip(names, values, strict=True)))


def _filled(structure: Structure, values: Mapping[str, Any]) -> Any:
    leaves = [values.get(leaf.name) if isinstance(leaf, Variable) else None for leaf in structure.leaves]
    return jax.tree.unflatten(structure.treedef, leaves)


def _words(value: Any, seen: set[int], whole: bool = False) -> Iterator[str]:
    """The names of the functions that made a function, and those that it calls."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, tuple | list):
        for part in value[:_MANY]:
            yield from _words(part, seen)
    elif whole and callable(inner := getattr(value, "__func__", None)):
        yield type(value.__self__).__name__
        yield from _words([*vars(value.__self__).values(), inner], seen)
    elif hasattr(value, "__closure__") and id(value) not in seen:
        seen.add(id(value))
        maker = value.__qualname__.partition(".")[0]
        yield from [maker] if maker.isidentifier() else []
        yield from _words([_content(cell) for cell in value.__closure__ or ()], seen)


def _content(cell: Any) -> Any:
    """The value in a closure; None before it is assigned."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _lacking(text: str) -> str:
    """The arguments that a call of the transformation lacked, in the words of the error."""
    missing = re.search(r"missing \d+ required [\w-]+ arguments?: (.+)$", text)
    if missing is not None:
        return missing[1]
    return ", ".join(map(repr, dict.fromkeys(re.findall(r"\b(?:value_fn|obj_fn|grad_fn)\b", text))))


def _found(value: Any) -> str:
    if callable(value) and not isinstance(value, type):
        return f"the function {getattr(value, '__name__', value)!r}"
    return describe(value)


_MANY = 100
_SILENT = ("with_extra_args_support", "init_empty_state", "chain", "identity")
_PLUMBING = re.compile(
    "with_extra_args_support|init_empty_state|(named_)?chain|identity|partition|multi_transform|masked|"
    "selective_transform|inject_(stateful_)?hyperparams|.*clip.*|add_.*|zero_nans|centralize|MultiSteps|"
    "GradientTransformation.*|apply_if_finite|flatten"
)
_NO_PAIR = (
    "from_optax was given {found}; expected a gradient transformation with init(parameters) and "
    "update(gradients, state, parameters), such as optax.adamw(1e-3)."
)
_NEEDS_MORE = (
    "{what} needs more than gradients, state and parameters: {lacks}. An update has these three alone. Take "
    "what evaluates the loss here: ow.LBFGS searches along a line, ow.optimizer.Sophia takes second "
    "derivatives, ow.schedule.plateau follows the loss; or write a class of ow.Optimizer with evaluates_loss "
    "= True, which is given the loss as a function."
)
