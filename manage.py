#!/usr/bin/env python
"""Django's entry point; every command of `python manage.py help` runs through here."""

import os
import sys

if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "keyvault.project.settings")
    from django.core.exceptions import ImproperlyConfigured
    from django.core.management import execute_from_command_line

    try:
        execute_from_command_line(sys.argv)
    except ImproperlyConfigured as error:
        sys.exit(f"{os.path.basename(sys.argv[0])}: {error}")
