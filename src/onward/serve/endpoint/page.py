"""The routes, inputs and outputs as a page for people, which needs nothing from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from onward.explain.style import MONO, page, text
from onward.serve.endpoint.bodies import NPY
from onward.serve.endpoint.openapi import example
from onward.serve.endpoint.plan import Input, RequestPlan
from onward.serve.endpoint.service import ModelService

_CSS = f"""
main {{ max-width: 56rem; margin: 0 auto; padding: 2rem 1.5rem 4rem; line-height: 1.5; }}
h1 {{ font-size: 1.6rem; margin: 0 0 .25rem; }}
h2 {{ font-size: 1.1rem; margin: 2rem 0 .5rem; }}
p.faint {{ color: var(--ow-faint); margin: 0 0 1rem; }}
table {{ border-collapse: collapse; width: 100%; }}
th {{ text-align: left; color: var(--ow-faint); font-weight: normal; }}
th, td {{ border-bottom: 1px solid var(--ow-line); padding: .35rem 1rem .35rem 0; vertical-align: top; }}
code, pre {{ font-family: {MONO}; font-size: .9em; }}
pre {{ background: var(--ow-panel); border: 1px solid var(--ow-line); border-radius: 6px; padding: .8rem;
  overflow-x: auto; white-space: pre-wrap; word-break: break-all; }}
"""
_LONGEST = 240  # characters of an example that are worth reading


def docs(endpoint: ModelService, url: str, routes: Mapping[str, tuple[str, str]]) -> str:
    """The page of an endpoint, with commands to try at its address."""
    served = endpoint.served
    plan, source = served.plan, served.source
    listed = [(method, path, about) for path, (method, about) in routes.items()]
    outputs = [(v.name, str(v.dtype), str(v.type)) for v in plan.outputs()]
    body = [
        f"<h1>{text(endpoint.name)}</h1>",
        f'<p class="faint">{text(source.model)}, version {text(source.version)}, served by Onward.</p>',
        "<h2>Routes</h2>",
        _table(("method", "path", "answers"), listed, code=(0, 1)),
        "<h2>What a request holds</h2>",
        _table(("name", "dtype", "shape, n: the examples"), [_input(x) for x in plan.inputs], code=(0, 1, 2)),
        "<h2>What is answered</h2>",
        _table(("name", "dtype", "as traced"), outputs, code=(0, 1, 2)),
        "<h2>Try it</h2>",
        *(f"<p>{text(about)}</p><pre>{text(command)}</pre>" for about, command in _commands(plan, url)),
        f"<h2>Limits</h2><p>{text(_limits(endpoint))}</p>",
    ]
    return page(f"{endpoint.name}: Onward", f"<main>{''.join(body)}</main>", _CSS)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], code: Sequence[int]) -> str:
    def cell(place: int, value: str) -> str:
        return f"<td><code>{text(value)}</code></td>" if place in code else f"<td>{text(value)}</td>"

    titles = "".join(f"<th>{text(title)}</th>" for title in head)
    lines = ("".join(cell(i, value) for i, value in enumerate(row)) for row in rows)
    return f"<table><tr>{titles}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _input(x: Input) -> tuple[str, str, str]:
    return x.name, str(x.variable.dtype), f"[{', '.join(map(str, x.shape))}]"


def _commands(plan: RequestPlan, url: str) -> list[tuple[str, str]]:
    """Requests to try, each with its command; an example that is too long to read comes from NumPy."""
    post = f"curl -s {url}/predict"
    given = json.dumps(example(plan), separators=(",", ":"))
    json_too = f"{post} -H 'content-type: application/json' -d '{given}'"
    found = (
        [("JSON in, JSON out:", json_too)]
        if len(given) <= _LONGEST
        else [("JSON in, JSON out:", _long(plan, url))]
    )
    if len(plan.inputs) == 1:
        x = plan.inputs[0]
        dtype, shape = x.variable.dtype, ", ".join(str(n) for n in x.variable.shape[1:])
        made = f"python -c \"import numpy; numpy.save('x.npy', numpy.zeros((1, {shape}), '{dtype}'))\""
        binary = f"{post} -H 'content-type: {NPY}' -H 'accept: {NPY}' --data-binary @x.npy -o y.npy"
        found.append(("The same as NumPy files, which are smaller and faster:", f"{made}\n{binary}"))
    return found


def _long(plan: RequestPlan, url: str) -> str:
    arrays = ", ".join(f"'{x.name}': numpy.zeros({x.example}).tolist()" for x in plan.inputs)
    made = f'python -c "import json, numpy; print(json.dumps({{{arrays}}}))" > x.json'
    return f"{made}\ncurl -s {url}/predict -H 'content-type: application/json' -d @x.json"


def _limits(endpoint: ModelService) -> str:
    return (
        f"A body has at most {endpoint.max_body:,} bytes and comes within {endpoint.timeout:g} seconds; so "
        f"long an answer may take as well. Up to {endpoint.max_batch} examples are computed at once, be they "
        'of one request or of many. A request that is refused is answered by {"error": "..."}, which says '
        "what was expected."
    )
