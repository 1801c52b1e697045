"""The console's menu: by work, not by table. Each page and model admin names the entry under which it is found."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from django.contrib.admin import AdminSite
from django.http import HttpRequest, HttpResponseBase
from django.urls import URLPattern, path, reverse

from keyvault.access.permissions import Permission
from keyvault.admin.framework.enforcement import guard_view, may

MENU = {
    "Operate": ("Approvals", "Rotations", "Schedules", "Campaigns", "Incidents"),
    "Directory": ("Merchants", "Credentials", "Webhooks", "Provider connections"),
    "Policy": ("Endpoint catalog", "Limits", "Service tokens", "Operators"),
    "Observe": ("Explain a denial", "Audit log", "Verifiers and health"),
}
"""Entries by section. An entry without a page that the operator may view is not shown."""

ENTRIES = tuple(entry for entries in MENU.values() for entry in entries)

_URGENT = frozenset({"Approvals", "Incidents"})
"""Entries whose count is red."""


@dataclass(frozen=True, slots=True)
class ConsolePage:
    """A page of the console that is no model admin.

    Args:
        name: of the route, for `reverse("admin:NAME")`.
        route: below `/admin/`, such as `approvals/`, or with parameters, such as `merchants/<str:merchant_id>/`.
        label: of the tab below the entry.
        menu: entry of the menu; empty: the page is reached by links only.
        permissions: any one of them opens the page. The view checks again for its rows.
        view: called with the site, the request and the parameters of the route.
    """

    name: str
    route: str
    label: str
    menu: str
    permissions: tuple[Permission, ...]
    view: Callable[..., HttpResponseBase]
    methods: Sequence[str] = ("GET", "HEAD")

    def tab_for(self, request: HttpRequest) -> "Tab | None":
        """Return the tab of the page, if the operator may open it."""
        if not self.menu or not any(may(request, permission) for permission in self.permissions):
            return None
        return Tab(self.label, reverse(f"admin:{self.name}"), request.path)


@dataclass(frozen=True, slots=True)
class Tab:
    """A page below an entry of the menu. `path`: of the request."""

    label: str
    url: str
    path: str

    @property
    def is_current(self) -> bool:
        return self.path.startswith(self.url)


@dataclass(frozen=True, slots=True)
class MenuEntry:
    """An entry of the menu with its pages, of which the first is opened."""

    label: str
    tabs: Sequence[Tab]
    count: str = ""

    @property
    def url(self) -> str:
        return self.tabs[0].url

    @property
    def is_current(self) -> bool:
        return any(tab.is_current for tab in self.tabs)

    @property
    def is_urgent(self) -> bool:
        return self.label in _URGENT


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    entries: Sequence[MenuEntry]


def build_menu(tabs: Sequence[tuple[str, Tab]], counts: Mapping[str, str]) -> list[Section]:
    """Return the sections of the menu that have a page.

    Args:
        tabs: each with its entry, in the order of the tabs. A tab with the label of its entry comes first, because the
            entry opens it.
        counts: number of rows that need the operator, by entry.
    """
    sections, tabs = [], sorted(tabs, key=lambda each: each[0] != each[1].label)
    for title, labels in MENU.items():
        found = [
            MenuEntry(label, [tab for entry, tab in tabs if entry == label], counts.get(label, "")) for label in labels
        ]
        entries = [entry for entry in found if entry.tabs]
        if entries:
            sections.append(Section(title, entries))
    return sections


def page_route(site: AdminSite, page: ConsolePage) -> URLPattern:
    """Return the guarded route of a page."""
    view = guard_view(site, page.permissions, page.methods, partial(page.view, site))
    return path(page.route, view, name=page.name)
