#!/usr/bin/env python
"""Django's entry point; every command of `python manage.py help` runs through here."""

import os
import sys

if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "keyvault.project.settings")
    from django.core.management import execute_from_command_line

    execute_from_command_line(sys.argv)
