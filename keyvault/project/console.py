"""The admin site of this project, in place of Django's default one."""

from django.contrib.admin.apps import AdminConfig


class ConsoleConfig(AdminConfig):
    default_site = "keyvault.admin.site.ConsoleSite"
