"""The environment that the operator has chosen to see. It limits lists and the overview, and grants nothing."""

from django.http import HttpRequest

from keyvault.access.scopes import AccessScope
from keyvault.admin.framework.enforcement import operator_of
from keyvault.domain.environments import Environment

_MEMBER = "console_environment"
"""Member of the session's data."""


def environment_of(request: HttpRequest) -> Environment | None:
    """Return the chosen environment; None: all that are in the operator's scope."""
    chosen = request.session.get(_MEMBER)
    return Environment(chosen) if chosen in operator_of(request).scope.environments else None


def choose_environment(request: HttpRequest, name: str) -> None:
    """Keep the choice in the session; a name that is no environment of the operator means all."""
    if name in operator_of(request).scope.environments:
        request.session[_MEMBER] = name
    else:
        request.session.pop(_MEMBER, None)


def shown_scope(request: HttpRequest) -> AccessScope:
    """Return the part of the operator's scope that lists and the overview show."""
    return operator_of(request).scope.narrowed_to(None, environment_of(request))
