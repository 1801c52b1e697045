"""Django's own apps as this project configures them."""

from django.contrib.admin.apps import SimpleAdminConfig
from django.contrib.auth.apps import AuthConfig
from django.contrib.auth.signals import user_logged_in


class OperatorsConfig(AuthConfig):
    def ready(self) -> None:
        """Disconnect Django's own write to the user: `services.sessions.sign_in` records the time of a sign-in."""
        super().ready()
        user_logged_in.disconnect(dispatch_uid="update_last_login")


class ConsoleConfig(SimpleAdminConfig):
    """The admin site of this project, in place of Django's default one."""

    default_site = "keyvault.admin.site.ConsoleSite"
