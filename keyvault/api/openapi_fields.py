"""What our own serializers and fields mean, for drf-spectacular: it finds these by themselves once they are loaded."""

from typing import Any

from django.core.validators import RegexValidator
from drf_spectacular.extensions import OpenApiSerializerExtension, OpenApiSerializerFieldExtension

_NO_NUL = r"^[^\u0000]*$"


class VerifyRequestExtension(OpenApiSerializerExtension):  # type: ignore[no-untyped-call]  # untyped package
    """The endpoint by its name, or by its request line."""

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
        """Lengths, and the pattern of a validator, are added by drf-spectacular itself."""
        # Beside a pattern, drf-spectacular would have a blank text twice, under a `oneOf` that it then fails.
        if self.target.allow_blank or any(isinstance(each, RegexValidator) for each in self.target.validators):
            return {"type": "string"}
        pattern = _NO_NUL if self.target.pattern is None else f"^(?:{self.target.pattern})$"
        return {"type": "string", "pattern": pattern}


class ClientAddressExtension(OpenApiSerializerFieldExtension):  # type: ignore[no-untyped-call]  # untyped package
    target_class = "keyvault.api.serializers.ClientAddress"

    def map_serializer_field(self, auto_schema: Any, direction: Any) -> Any:
        return {"type": "string", "anyOf": [{"format": "ipv4"}, {"format": "ipv6"}]}
