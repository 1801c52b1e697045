"""REST framework's permission classes. By themselves: its settings load them before its views exist."""

from rest_framework.permissions import BasePermission

from keyvault.access.principals import Service


class DeniedByDefault(BasePermission):
    """A view that says nothing about its callers has none."""

    def has_permission(self, request: object, view: object) -> bool:
        return False


class HasServiceToken(BasePermission):
    """The authentication proved a service token."""

    def has_permission(self, request: object, view: object) -> bool:
        return isinstance(getattr(request, "user", None), Service)
