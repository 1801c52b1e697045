"""What Schemathesis cannot be told in its settings."""

from typing import Any

import schemathesis
from schemathesis.core import NotSet


@schemathesis.hook
def before_call(context: schemathesis.HookContext, case: schemathesis.Case[Any], kwargs: dict[str, Any]) -> None:
    """JSON Schema takes 1.0 for an integer, and the page cannot say that we do not: so it is sent as 1."""
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
