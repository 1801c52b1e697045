"""Tests of the console, whose pages are registered with its routes."""

from django.contrib import admin

admin.autodiscover()
