"""REST framework permission classes, in their own module because its settings import them before its views."""

from rest_framework.permissions import BasePermission

from keyvault.access.principals import Service


class DeniedByDefault(BasePermission):
    """Deny every request to a view that declares no permission."""

    def has_permission(self, request: object, view: object) -> bool:
        return False


class HasServiceToken(BasePermission):
    """Allow requests that a service token authenticates."""

    def has_permission(self, request: object, view: object) -> bool:
        return isinstance(getattr(request, "user", None), Service)
