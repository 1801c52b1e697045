"""Authorization of the console: the one decision function decides on every page and every action.

Every model admin of the console inherits `Guarded`, and every view is routed through `guarded`. Django's admin
may only view: adding, changing and deleting rows, bulk actions and editable lists are disabled. Django's model
permissions are never consulted; `access.roles` defines the permissions of each role.
"""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import wraps
from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.contrib.admin import AdminSite
from django.db.models import Model
from django.http import HttpRequest, HttpResponseBase, HttpResponseNotAllowed

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission
from keyvault.access.principals import OperatorPrincipal
from keyvault.access.scopes import EVERYWHERE, AccessScope
from keyvault.domain.errors import PermissionMissingError
from keyvault.models import Account
from keyvault.models import Operator as OperatorRow
from keyvault.services.recording.authorization import authorize, is_allowed, operator_principal
from keyvault.services.sessions.role_uses import role_uses

if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin[Any]
else:
    _ModelAdmin = object

View = Callable[..., HttpResponseBase]


def operator_of(request: HttpRequest) -> OperatorPrincipal:
    """Return the signed-in operator, read once per request.

    Raises:
        PermissionMissingError: no operator is signed in.
    """
    known: OperatorPrincipal | None = getattr(request, "console_operator", None)
    if known is None:
        if not isinstance(request.user, OperatorRow):
            raise PermissionMissingError("Not signed in. Sign in to the console.")
        known = operator_principal(request.user)
        request.console_operator = known  # type: ignore[attr-defined]  # read back two lines above
    return known


def may(
    request: HttpRequest,
    permission: Permission,
    account: Account | None = None,
    *,
    requester_person: str | None = None,
    within: AccessScope | None = None,
) -> bool:
    """Whether the operator has the permission; used to show or hide links and to open a page.

    `within`: see `authorize`. None: anywhere in the operator's scope.
    """
    operator = operator_of(request)
    return is_allowed(
        operator,
        permission,
        account,
        now=datetime.now(UTC),
        requester_person=requester_person,
        within=operator.scope if within is None else within,
    )


def grant_for(
    request: HttpRequest,
    permission: Permission,
    account: Account | None = None,
    *,
    requester_person: str | None = None,
    within: AccessScope = EVERYWHERE,
) -> Grant:
    """Return the grant that the service requires. Raises the errors of `authorize`."""
    return authorize(
        operator_of(request),
        permission,
        account,
        now=datetime.now(UTC),
        requester_person=requester_person,
        within=within,
    )


_LOOKUPS = ("", "__exact", "__id__exact", "__isnull", "__gte", "__lt", "__lte", "__gt")
"""Lookups that the console's own filters send; the query string accepts no other, such as a regular expression."""


class Guarded(_ModelAdmin):
    """Mixin that restricts a model admin to viewing.

    Any one of `view_permissions` allows viewing; an empty tuple denies everyone.
    """

    view_permissions: tuple[Permission, ...] = ()

    actions = None  # no bulk actions
    list_editable = ()

    def has_view_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return any(may(request, permission) for permission in self.view_permissions)

    def has_module_permission(self, request: HttpRequest) -> bool:
        return self.has_view_permission(request)

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Deny: services create rows."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        """Deny: services change rows."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest) -> bool:
        """Allow only the filters that the list shows, so the query string cannot probe other columns."""
        shown = map(_filter_name, self.get_list_filter(request))
        return any(lookup == f"{name}{suffix}" for name in shown for suffix in _LOOKUPS)

    def guarded(self, permissions: tuple[Permission, ...], methods: Sequence[str], view: View) -> View:
        """See `guard_view`."""
        return guard_view(self.admin_site, permissions, methods, view)


def guard_view(site: AdminSite, permissions: tuple[Permission, ...], methods: Sequence[str], view: View) -> View:
    """Wrap a view so that it requires one of the permissions; the view checks again for its row."""

    @wraps(view)
    def guarded(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        if not any(may(request, permission) for permission in permissions):
            raise PermissionMissingError(
                f"Missing permission: {' or '.join(permissions)}. Ask an administrator for a role that has it."
            )
        if request.method not in methods:
            return HttpResponseNotAllowed(methods)
        role_uses.note(operator_of(request), permissions, datetime.now(UTC))
        return view(request, *args, **kwargs)

    return site.admin_view(guarded)


def _filter_name(item: Any) -> str:
    """Return the query parameter of a list filter: a field path or the filter's own parameter."""
    if isinstance(item, type) and issubclass(item, admin.SimpleListFilter):
        return str(item.parameter_name)
    return str(item[0] if isinstance(item, tuple) else item)
