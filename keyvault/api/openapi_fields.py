"""The schema of our own text field for drf-spectacular, which registers it on import."""

from typing import Any

from django.core.validators import RegexValidator
from drf_spectacular.extensions import OpenApiSerializerFieldExtension

_NO_NUL = r"^[^\u0000]*$"


class StrictTextExtension(OpenApiSerializerFieldExtension):  # type: ignore[no-untyped-call]  # untyped package
    target_class = "keyvault.api.serializers.StrictText"

    def map_serializer_field(self, auto_schema: Any, direction: Any) -> Any:
        """Return the pattern; drf-spectacular adds lengths and the patterns of validators."""
        # With a pattern, drf-spectacular lists the blank text twice in a `oneOf`, which then never matches.
        if self.target.allow_blank or any(isinstance(each, RegexValidator) for each in self.target.validators):
            return {"type": "string"}
        pattern = _NO_NUL if self.target.form is None else f"^(?:{self.target.form.pattern})$"
        return {"type": "string", "pattern": pattern}
