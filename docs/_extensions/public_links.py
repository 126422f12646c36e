"""Public names become links to the reference: ``ow.name`` anywhere, a bare class name within the reference.

It also prepares docstrings for Sphinx: what is indented without being a section is shown as it stands.
"""

import re
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

import onward
from onward.core.whereabouts import public_paths

NAME = re.compile(r"(ow\.|onward\.)?([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(\(.*\))?$", re.DOTALL)
SECTION = re.compile(r"(Args|Returns|Raises|Yields|Example|Examples|Attributes|Note|Notes):$")
STAR = re.compile(r"(?<![\w*`])\*(?=\w)(?=(?:[^`]*``[^`]*``)*[^`]*$)")  # (*data), outside of inline code
PATHS = {path.rpartition(".")[2]: path for path in reversed(public_paths(onward))}  # by the last word


def setup(app: Sphinx) -> dict[str, bool]:
    """Tell Sphinx what is here."""
    app.add_transform(LinkNames)
    app.connect("autodoc-process-docstring", show_indented_text, priority=100)
    app.connect("missing-reference", resolve_by_last_word)
    return {"parallel_read_safe": True}


class LinkNames(SphinxTransform):
    """Wraps inline code that is a public name in a reference to where it is explained."""

    default_priority = 400

    def apply(self, **kwargs: Any) -> None:
        """Look through one document."""
        inside = self.env.docname.startswith("reference/")
        for literal in list(self.document.findall(nodes.literal)):
            target = target_of(literal.astext(), bare=inside)
            if target and not has_link(literal):
                literal.replace_self(reference(target, literal.deepcopy(), self.env.docname))


def target_of(text: str, bare: bool) -> str | None:
    """The path of the public name that a piece of inline code is, if it is one."""
    found = NAME.match(text)
    first, _, rest = found[2].partition(".") if found else ("", "", "")
    is_module = isinstance(getattr(onward, first), ModuleType) if first in onward.__all__ else False
    if found and found[1] and first in onward.__all__:
        return f"onward.{found[2]}"
    if bare and ((is_module and rest) or (first[:1].isupper() and first in PATHS)):
        return ".".join(["onward", PATHS[first], *([rest] if rest else [])])
    return None


def has_link(node: nodes.Node) -> bool:
    """Whether a node stands in a link or a title already."""
    while node.parent is not None:
        node = node.parent
        if isinstance(node, nodes.reference | addnodes.pending_xref | nodes.title):
            return True
    return False


def reference(target: str, shown: nodes.Node, docname: str) -> addnodes.pending_xref:
    """A reference that stays plain code where the name has no place of its own."""
    return addnodes.pending_xref(
        "",
        shown,
        refdomain="py",
        reftype="obj",
        reftarget=target,
        refexplicit=True,
        refwarn=False,
        refdoc=docname,
    )


def resolve_by_last_word(app: Sphinx, env: Any, node: Any, shown: nodes.Element) -> nodes.Node | None:
    """A type in a signature is that of the module that defines it; its page has the public name."""
    name = node.get("reftarget", "").rsplit(".", 1)[-1]
    if node.get("refdomain") != "py" or name not in PATHS:
        return None
    domain = env.get_domain("py")
    return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", f"onward.{PATHS[name]}", node, shown)


def show_indented_text(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are written for a terminal: an indented table is to stay one."""
    lines[:] = list(with_literal_blocks(lines))


def with_literal_blocks(lines: Iterable[str]) -> Iterator[str]:
    """The same lines, ``::`` before each indented part that no section begins."""
    section, before, literal = False, "", False
    for line in lines:
        indented = line.startswith("    ")
        if line and not indented:
            section, literal = bool(SECTION.match(line)), False
        if line and not indented:
            line = STAR.sub(r"\\*", line)
        if indented and not section and not literal and not before.strip():
            yield from ("::", "")
            literal = True
        yield line
        before = line
