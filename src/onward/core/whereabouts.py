"""Where a name is that somebody looked for in the wrong place, or wrote in another way."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from types import ModuleType

_ELSEWHERE = {
    "Conv2d": "layer.conv",
    "CrossEntropyLoss": "layer.cross_entropy",
    "Dense": "layer.fc",
    "Embed": "layer.embedding",
    "Linear": "layer.fc",
    "MSELoss": "layer.mse",
    "backward": "append_backward",
    "fit": "train",
    "grad": "gradients",
    "jit": "compile",
    "losses": "layer",
    "lr_scheduler": "schedule",
    "minimize": "Optimizer.minimize",
    "nn": "layer",
    "optim": "optimizer",
    "pmap": "replicate",
    "remat": "recompute",
    "value_and_grad": "gradients",
}  # what other libraries call it, and what it is called here


def whereabouts(name: str, module: ModuleType, known_as: str) -> str:
    """A sentence that says where a name is which a module does not have, or which come nearest.

    >>> import onward as ow
    >>> whereabouts("ADOPT", ow, "ow"), whereabouts("adam", ow, "ow"), whereabouts("Linear", ow, "ow")
    ('It is ow.optimizer.ADOPT.', 'It is ow.Adam.', 'It is ow.layer.fc.')
    >>> whereabouts("replicated", ow, "ow")
    'The nearest names are ow.replicate.'
    """
    paths = public_paths(module)
    found = (
        [path for path in paths if path.rpartition(".")[2] == name]
        or [path for path in (_ELSEWHERE.get(name, ""),) if path.split(".")[0] in paths]
        or [path for path in paths if _plain(path) == _plain(name)]
    )
    if found:
        return f"It is {' or '.join(f'{known_as}.{path}' for path in found)}."
    by_word = {_plain(path): path for path in reversed(paths)}
    close = [by_word[word] for word in get_close_matches(_plain(name), by_word, cutoff=0.7)]
    if close:
        return f"The nearest names are {', '.join(f'{known_as}.{path}' for path in close)}."
    return f"dir({known_as}) lists the names that there are."


def public_paths(module: ModuleType) -> Sequence[str]:
    """Every public name of a module, and those of the modules among them, such as ``layer.fc``.

    A name that a module has too is listed once, without that.
    """
    values = {name: getattr(module, name) for name in module.__all__}
    modules = {name: value for name, value in values.items() if isinstance(value, ModuleType)}
    held = (
        (f"{name}.{other}", getattr(value, other), other)
        for name, value in modules.items()
        for other in value.__all__
    )
    return [*values, *(path for path, value, other in held if values.get(other) is not value)]


def _plain(path: str) -> str:
    """The last word of a path, without capitals and underscores."""
    return path.rpartition(".")[2].lower().replace("_", "")
