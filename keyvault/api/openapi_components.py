"""Schemas of bodies that are documented and never parsed, as components of the OpenAPI page."""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
INTEGER: Schema = {"type": "integer"}
INSTANT: Schema = {"type": "string", "format": "date-time"}
ANY_OBJECT: Schema = {"type": "object", "additionalProperties": {}}

COMPONENTS: dict[str, Schema] = {}
"""The defined schemas by name. `openapi.finish` adds them to the page."""


def define(name: str, schema: Schema) -> Schema:
    """Add a component. Returns a reference to it."""
    COMPONENTS[name] = schema
    return reference(name)


def reference(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def obj(description: str = "", /, *, optional: Mapping[str, Schema] | None = None, **required: Schema) -> Schema:
    """Return the schema of an object with exactly these properties."""
    return {
        "type": "object",
        **({"description": description} if description else {}),
        "properties": {**required, **(optional or {})},
        **({"required": sorted(required)} if required else {}),
        "additionalProperties": False,
    }


def one_of(members: Iterable[StrEnum | str]) -> Schema:
    return {"type": "string", "enum": [str(member) for member in members]}


def list_of(schema: Schema) -> Schema:
    return {"type": "array", "items": schema}


def nullable(schema: Schema) -> Schema:
    if "$ref" in schema:
        return {"oneOf": [schema, {"type": "null"}]}
    enum = {"enum": [*schema["enum"], None]} if "enum" in schema else {}
    return {**schema, **enum, "type": [schema["type"], "null"]}
