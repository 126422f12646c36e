"""The reference: one page for each topic of each folder of the house, written from ``onward.__all__``.

A name, or one that a module holds, such as ``layer.fc``, belongs to the first topic that fits where it is
defined. A name without a topic ends the build.
"""

import inspect
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import Enum
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.inspect import stringify_signature

import onward
from onward.core.whereabouts import public_paths
from onward.derive.rule import Rule

FOLDERS = {
    "core": "What a Program is",
    "define": "A pure function becomes a forward Program",
    "derive": "Forward, then backward, then update",
    "develop": "The same training with less memory and time",
    "distribute": "One Program for many devices",
    "execute": "A Program becomes an executable and runs",
    "explain": "What a person wants to know about a Program",
    "serve": "A trained Program answers",
}


@dataclass(frozen=True)
class Topic:
    """A page: its title, and how the paths of the modules begin whose names it shows."""

    title: str
    paths: tuple[str, ...]


TOPICS = {
    "core-program": Topic(
        "Programs",
        (
            "core.graph",
            "core.program",
            "core.variable",
            "core.jaxprs",
            "core.words",
            "core.check",
            "core.transform",
        ),
    ),
    "core-walk": Topic(
        "Walking, showing, counting",
        ("core.walk", "core.printed", "core.cost", "core.homes", "develop.graph"),
    ),
    "core-errors": Topic("Errors", ("core.errors",)),
    "core-types": Topic("Types to annotate with", ("typing",)),
    "define-trace": Topic(
        "Trace and declare", ("define.trace", "define.declare", "define.lazy", "define.deferred")
    ),
    "define-layer": Topic("Layers", ("define.layer",)),
    "define-initializer": Topic("Initializers", ("define.initializer",)),
    "derive-backward": Topic(
        "Backward pass", ("derive.backward", "develop.seam", "derive.clip", "derive.error_clip")
    ),
    "derive-optimizer": Topic("Optimizers", ("derive.optimizer.", "derive.optimizers")),
    "derive-rules": Topic("Rules and groups", ("derive.rules", "derive.rule.", "derive.update")),
    "derive-schedules": Topic("Schedules", ("derive.schedules",)),
    "develop-transforms": Topic("Transforms", ("derive.for_", "derive.low_rank", "develop.")),
    "distribute-replicate": Topic(
        "Many devices",
        ("distribute.replicate", "distribute.partition", "distribute.plan", "distribute.layout"),
    ),
    "distribute-merge": Topic(
        "Merge strategies",
        (
            "distribute.merge",
            "distribute.merges",
            "distribute.sharded",
            "distribute.compressed",
            "distribute.local",
        ),
    ),
    "distribute-pipeline": Topic("Pipelines", ("distribute.pipeline", "execute.pipelined")),
    "distribute-split": Topic("Parameter servers", ("distribute.split",)),
    "execute-compile": Topic(
        "Compile and step",
        (
            "execute.averaged",
            "execute.compile",
            "execute.merged",
            "execute.step",
            "execute.state",
            "execute.out",
            "execute.storage",
            "execute.options",
            "execute.trials",
            "execute.tuning",
            "execute.host_memory",
        ),
    ),
    "execute-cluster": Topic("Clusters", ("fleet",)),
    "execute-loop": Topic("Data, training loop, history", ("execute.loop", "fit.train.")),
    "execute-model": Topic(
        "Models, trainers, checkpoints",
        (
            "fit.model",
            "fit.evaluator",
            "fit.gradient_machine",
            "fit.trainer",
            "execute.checkpoint",
            "execute.exchange",
            "execute.restore",
            "execute.nonfinite",
        ),
    ),
    "execute-session": Topic("Sessions", ("fit.session", "fit.scope")),
    "explain-pictures": Topic(
        "Draw, diff, inspect, adopt",
        (
            "explain.draw",
            "explain.diff",
            "explain.inspect",
            "explain.adopt",
            "explain.compare",
            "explain.files",
        ),
    ),
    "explain-cost": Topic(
        "Cost, memory, time",
        (
            "explain.summary",
            "explain.memory",
            "explain.budget",
            "explain.profile",
            "explain.compiling",
            "explain.collectives",
        ),
    ),
    "explain-watch": Topic(
        "Watched numbers, faults", ("explain.watched", "explain.find_nonfinite", "explain.testing")
    ),
    "serve-export": Topic("Export", ("serve.export",)),
    "serve-endpoint": Topic("Endpoint", ("serve.",)),
}

# What has no docstring of its own, and does not say where it was defined: where, its type, and what it is.
VALUES = {
    "Hyperparameter": ("derive.rule", "float | Schedule", "A number that becomes a Variable, or a schedule."),
    "typing.Schedule": (
        "derive.rule",
        "Callable[[Array], Array]",
        "A pure function of the step, counted from 0.",
    ),
    "typing.Slots": ("derive.rule", "Mapping[str, Array]", "What a rule keeps for a parameter, by name."),
    "__version__": ("core.program", "str", "The version of Onward, such as ``0.1.0``."),
}

# What every optimizer takes is explained once, at their base.
COMMON = {field.name for field in fields(onward.Optimizer)}

COMMON_NOTE = (
    "What is shown as `**common` are the arguments of `ow.Optimizer`, which every optimizer takes.\n"
)

# Of rules only these show their methods: all others have the same. Errors show none.
BASES = {"Optimizer", "GradientRule", "ParameterRule"}


def setup(app: Sphinx) -> dict[str, bool]:
    """Tell Sphinx what is here."""
    app.connect("builder-inited", write)
    app.connect("autodoc-process-signature", signature_of_rule)
    return {"parallel_read_safe": True}


def write(app: Sphinx) -> None:
    """Write all pages of the reference below the source folder."""
    folder = Path(app.srcdir) / "reference"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    names = names_by_topic()
    for topic, found in names.items():
        (folder / f"{topic}.md").write_text(page(TOPICS[topic].title, found))
    (folder / "index.md").write_text(index(names))


def names_by_topic() -> dict[str, list[str]]:
    """Each public name once, under its topic; topics in the order of the house."""
    found: dict[str, list[str]] = {topic: [] for topic in TOPICS}
    for name in public_paths(onward):
        found[topic_of(name)].append(name)
    return {topic: sorted(names, key=str.lower) for topic, names in found.items() if names}


def topic_of(name: str) -> str:
    """The topic that comes first among those that a name's module fits."""
    path = path_of(name) + "."
    for key, topic in TOPICS.items():
        if any(path.startswith(start) for start in topic.paths):
            return key
    raise ExtensionError(
        f"onward.{name} stands in {path}, which no topic in {Path(__file__).name} begins with"
    )


def path_of(name: str) -> str:
    """Where a name is defined, such as ``core.program``."""
    if name in VALUES:
        return VALUES[name][0]
    value = attrgetter(name)(onward)
    module = value.__name__ if isinstance(value, ModuleType) else value.__module__
    return str(module).removeprefix("onward.")


def index(names: dict[str, list[str]]) -> str:
    """The page that leads to all others, by folder."""
    lines = ["# Reference", "", "Every public name, by the folder of the house that defines it.", ""]
    for folder, meaning in FOLDERS.items():
        topics = [topic for topic in names if topic.startswith(f"{folder}-")]
        if topics:
            lines += [f"## {folder}", "", f"{meaning}.", ""]
            lines += [
                f"* [{TOPICS[t].title}]({t}): {', '.join(f'`ow.{n}`' for n in names[t])}" for t in topics
            ]
            lines += ["", "```{toctree}", ":hidden:", "", *topics, "```", ""]
    return "\n".join(lines)


def page(title: str, names: list[str]) -> str:
    """A page that shows these names."""
    note = COMMON_NOTE if "Optimizer" in names else ""
    directives = [line for name in names for line in directive(f"onward.{name}", attrgetter(name)(onward))]
    return "\n".join([f"# {title}", "", note, "```{eval-rst}", *directives, "```", ""])


def directive(path: str, value: Any) -> Iterator[str]:
    """What autodoc is told about one name."""
    if isinstance(value, ModuleType):
        yield from (f".. automodule:: {path}", "   :no-members:", "")
    elif isinstance(value, type):
        yield from (f".. autoclass:: {path}", *members(value), "")
    elif callable(value) and hasattr(value, "__code__"):
        yield from (f".. autofunction:: {path}", "")
    else:
        _, form, text = VALUES[path.removeprefix("onward.")]
        module, _, name = path.rpartition(".")
        yield from (
            f".. py:data:: {name}",
            f"   :module: {module}",
            f"   :type: {form}",
            "",
            f"   {text}",
            "",
        )


def members(value: type) -> Iterator[str]:
    """What is shown of a class: all that it has, the words of an Enum, or nothing where its base shows it."""
    if issubclass(value, Enum):
        yield from ("   :members:", "   :undoc-members:")
    elif not (issubclass(value, Rule | Warning | Exception) and value.__name__ not in BASES):
        yield from ("   :members:", "   :inherited-members: object,Sequence,Mapping")
    if value.__bases__ != (object,):
        yield "   :show-inheritance:"


def signature_of_rule(
    app: Sphinx, what: str, name: str, value: Any, options: Any, signature: str | None, returned: str | None
) -> tuple[str, None] | None:
    """A rule is made from its fields; its ``__new__``, which takes anything, only looks for mistakes."""
    if not (isinstance(value, type) and issubclass(value, Rule)):
        return None
    own = inspect.signature(value)
    kept = [p for p in own.parameters.values() if value is onward.Optimizer or p.name not in COMMON]
    if len(kept) < len(own.parameters):
        kept.append(inspect.Parameter("common", inspect.Parameter.VAR_KEYWORD))
    return stringify_signature(own.replace(parameters=kept, return_annotation=inspect.Signature.empty)), None
