"""Schemathesis hooks for what its settings cannot express."""

from typing import Any

import schemathesis
from schemathesis.core import NotSet


@schemathesis.hook
def before_call(context: schemathesis.HookContext, case: schemathesis.Case[Any], kwargs: dict[str, Any]) -> None:
    """Send 1.0 as 1: JSON Schema accepts 1.0 as an integer, and the service does so for a cost only."""
    if not isinstance(case.body, NotSet):
        case.body = _without_whole_floats(case.body)


def _without_whole_floats(value: Any) -> Any:
    match value:
        case float() if value.is_integer():
            return int(value)
        case list():
            return [_without_whole_floats(each) for each in value]
        case dict():
            return {name: _without_whole_floats(each) for name, each in value.items()}
    return value
