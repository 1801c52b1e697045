"""How the console asks: every page and every act of it goes through the one decision function.

Whatever the console shows is an admin with `Guarded` in it: Django's admin may view and nothing else, and a
view is routed through `guarded` or not at all. What Django's admin would offer besides (adding, changing and
deleting rows, bulk actions, lists that can be edited) is not permitted, and Django's own model permissions
are never consulted: roles and what they may do stand in `access.roles`.
"""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import wraps
from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.db.models import Model
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission
from keyvault.access.principals import Operator
from keyvault.domain.errors import PermissionMissingError
from keyvault.models import Account
from keyvault.models import Operator as OperatorRow
from keyvault.services.recording.authorization import authorize, is_allowed, operator_principal

if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin[Any]
else:
    _ModelAdmin = object

View = Callable[..., HttpResponse]


def operator_of(request: HttpRequest) -> Operator:
    """Who asks, read once for each request. Raises PermissionMissingError for nobody."""
    known: Operator | None = getattr(request, "console_operator", None)
    if known is None:
        if not isinstance(request.user, OperatorRow):
            raise PermissionMissingError("Sign in first.")
        known = operator_principal(request.user)
        request.console_operator = known  # type: ignore[attr-defined]  # read back two lines above
    return known


def may(
    request: HttpRequest,
    permission: Permission,
    account: Account | None = None,
    *,
    requester_person: str | None = None,
) -> bool:
    """Whether the operator would be granted it: for showing or hiding, and for opening a page at all."""
    return is_allowed(
        operator_of(request), permission, account, now=datetime.now(UTC), requester_person=requester_person
    )


def grant_for(
    request: HttpRequest,
    permission: Permission,
    account: Account | None = None,
    *,
    requester_person: str | None = None,
) -> Grant:
    """The grant for the service that does it. Raises what `authorize` raises."""
    return authorize(
        operator_of(request), permission, account, now=datetime.now(UTC), requester_person=requester_person
    )


_LOOKUPS = ("", "__exact", "__id__exact", "__isnull", "__gte", "__lt", "__lte", "__gt")
"""What the console's own filters send; no regular expression or the like comes in by the address."""


class Guarded(_ModelAdmin):
    """The mixin. Nobody sees the rows until `view_permissions` names who may; any one of them opens them."""

    view_permissions: tuple[Permission, ...] = ()

    actions = None
    list_editable = ()

    def has_view_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return any(may(request, permission) for permission in self.view_permissions)

    def has_module_permission(self, request: HttpRequest) -> bool:
        return self.has_view_permission(request)

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Rows are made by services."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        """Rows are changed by services."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest) -> bool:
        """Only the filters that the list shows: no other column can be probed through the address."""
        shown = map(_filter_name, self.get_list_filter(request))
        return any(lookup == f"{name}{how}" for name in shown for how in _LOOKUPS)

    def guarded(self, permissions: tuple[Permission, ...], methods: Sequence[str], view: View) -> View:
        """The view, for operators with one of the permissions only; it asks again once it knows its row."""

        @wraps(view)
        def guarded(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
            if not any(may(request, permission) for permission in permissions):
                raise PermissionMissingError(f"This needs the permission {' or '.join(permissions)}.")
            if request.method not in methods:
                return HttpResponseNotAllowed(methods)
            return view(request, *args, **kwargs)

        return self.admin_site.admin_view(guarded)


def _filter_name(item: Any) -> str:
    """What a filter of a list is called in the address: a field's path, or a parameter of its own."""
    if isinstance(item, type) and issubclass(item, admin.SimpleListFilter):
        return str(item.parameter_name)
    return str(item[0] if isinstance(item, tuple) else item)
