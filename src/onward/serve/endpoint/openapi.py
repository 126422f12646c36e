"""The routes as an OpenAPI document, for programs.

The format: https://spec.openapis.org/oas/v3.1.0
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import jax

from onward.core.program import Variable
from onward.serve.endpoint.bodies import JSON, NPY, NPZ
from onward.serve.endpoint.plan import Input, RequestPlan

_BINARY = {"schema": {"type": "string", "format": "binary"}}
_REFUSALS = {
    "400": "The body is not what its content type says.",
    "404": "No layer or output has the name.",
    "406": "No form that is accepted can be answered.",
    "408": "The body did not come in time.",
    "413": "The body is too large, or holds too many examples.",
    "415": "The content type is none of those that are read.",
    "422": "Names, shapes, dtypes or values are not what the model takes.",
    "500": "The model failed on this request.",
    "503": "Too much waits already, or the server ends; ask again later.",
    "504": "It took too long; ask again later.",
}


def openapi(title: str, plan: RequestPlan, routes: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    """The document.

    Args:
        title: the name of what is served.
        plan: what ``/predict`` answers.
        routes: method and meaning by path.
    """
    paths = {
        path: {method.lower(): _operation(path, about, plan)} for path, (method, about) in routes.items()
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version("onward")},
        "paths": paths,
        "components": {"schemas": {"Error": _object({"error": {"type": "string"}})}},
    }


def example(plan: RequestPlan) -> dict[str, Any]:
    """One example of every input, all zeros, as JSON would hold it."""
    return {x.name: _zeros(x.example) for x in plan.inputs}


def _operation(path: str, about: str, plan: RequestPlan) -> dict[str, Any]:
    found: dict[str, Any] = {"summary": about, "responses": {"200": {"description": about}}}
    if path == "/predict":
        fetch = {"name": "fetch", "in": "query", "schema": {"type": "string"}}
        found["parameters"] = [{**fetch, "description": "Names of Variables, with commas between them."}]
        found |= _asking(plan, {v.name: _schema(v, plan.shapes[v.name]) for v in plan.outputs()})
    if path.startswith("/activation"):
        layer = {"name": "layer", "in": "path", "required": True, "schema": {"type": "string"}}
        found["parameters"] = [{**layer, "description": "The name of any Variable; it may hold slashes."}]
        found |= _asking(plan, {})
    return found


def _asking(plan: RequestPlan, outputs: Mapping[str, Any]) -> dict[str, Any]:
    asked = {JSON: {"schema": _object({x.name: _given(x) for x in plan.inputs})}, NPY: _BINARY, NPZ: _BINARY}
    answered = {JSON: {"schema": _object({"outputs": _object(outputs)})}, NPY: _BINARY, NPZ: _BINARY}
    error = {JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}
    refusals = {status: {"description": about, "content": error} for status, about in _REFUSALS.items()}
    return {
        "requestBody": {"required": True, "content": asked},
        "responses": {"200": {"description": "Arrays by name.", "content": answered}, **refusals},
    }


def _given(x: Input) -> dict[str, Any]:
    return _schema(x.variable, x.shape) | {"description": str(x)}


def _schema(v: Variable, shape: tuple[int | str, ...]) -> dict[str, Any]:
    """An array as nested lists, each as long as its axis; those that have a word may have any length."""
    schema: dict[str, Any] = {"type": _type(v.dtype)}
    for length in reversed(shape):
        bounds = {"minItems": 1} if isinstance(length, str) else {"minItems": length, "maxItems": length}
        schema = {"type": "array", "items": schema, **bounds}
    return schema


def _type(dtype: Any) -> str:
    if jax.numpy.issubdtype(dtype, jax.numpy.bool_):
        return "boolean"
    return "integer" if jax.numpy.issubdtype(dtype, jax.numpy.integer) else "number"


def _object(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": dict(properties)}


def _zeros(shape: tuple[int, ...]) -> Any:
    if not shape:
        return 0
    return [_zeros(shape[1:]) for _ in range(shape[0])]
