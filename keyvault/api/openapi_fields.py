"""Schemas of our own serializers and fields for drf-spectacular, which registers them on import."""

from typing import Any

from django.core.validators import RegexValidator
from drf_spectacular.extensions import OpenApiSerializerExtension, OpenApiSerializerFieldExtension

_NO_NUL = r"^[^\u0000]*$"


class VerifyRequestExtension(OpenApiSerializerExtension):  # type: ignore[no-untyped-call]  # untyped package
    """A request names its endpoint either by `endpoint` or by `method` and `path`."""

    target_class = "keyvault.api.serializers.VerifyRequestBody"

    def map_serializer(self, auto_schema: Any, direction: Any) -> Any:
        schema = auto_schema._map_serializer(self.target, direction, bypass_extensions=True)
        by_name = {"required": ["endpoint"], "properties": {"method": False, "path": False}}
        by_line = {"required": ["method", "path"], "properties": {"endpoint": False}}
        schema["properties"]["user_agent"]["pattern"] = _NO_NUL
        return {**schema, "oneOf": [by_name, by_line]}


class RawTextExtension(OpenApiSerializerFieldExtension):  # type: ignore[no-untyped-call]  # untyped package
    target_class = "keyvault.api.serializers.RawText"

    def map_serializer_field(self, auto_schema: Any, direction: Any) -> Any:
        return {"type": "string"}


class StrictTextExtension(OpenApiSerializerFieldExtension):  # type: ignore[no-untyped-call]  # untyped package
    target_class = "keyvault.api.serializers.StrictText"

    def map_serializer_field(self, auto_schema: Any, direction: Any) -> Any:
        """Return the pattern; drf-spectacular adds lengths and the patterns of validators."""
        # With a pattern, drf-spectacular lists the blank text twice in a `oneOf`, which then never matches.
        if self.target.allow_blank or any(isinstance(each, RegexValidator) for each in self.target.validators):
            return {"type": "string"}
        pattern = _NO_NUL if self.target.pattern is None else f"^(?:{self.target.pattern})$"
        return {"type": "string", "pattern": pattern}


class ClientAddressExtension(OpenApiSerializerFieldExtension):  # type: ignore[no-untyped-call]  # untyped package
    target_class = "keyvault.api.serializers.ClientAddress"

    def map_serializer_field(self, auto_schema: Any, direction: Any) -> Any:
        return {"type": "string", "anyOf": [{"format": "ipv4"}, {"format": "ipv6"}]}
