"""The console's admin site."""

from django.contrib.admin import AdminSite


class ConsoleSite(AdminSite):
    site_header = "Keyvault"
    site_title = "Keyvault"
    index_title = "Console"
    enable_nav_sidebar = True
