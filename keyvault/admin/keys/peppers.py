"""Pepper versions in the console, as shown by `manage.py show_peppers`. Only the host creates and retires them."""

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.safestring import SafeString

from keyvault.access.permissions import Permission as P
from keyvault.admin.framework.columns import moment_column
from keyvault.admin.framework.model_admin import ConsoleModelAdmin
from keyvault.admin.framework.widgets import Detail, FactTable, badge, moment
from keyvault.models import PepperVersion
from keyvault.services.pepper_rotation.status import PepperState, describe_version
from keyvault.services.peppers.ring import list_served_sets

_NOTE = (
    "A key moves to the newest version when it is used. manage.py show_peppers --list counts what depends on a "
    "version and lists the unused keys. manage.py retire_pepper retires a version that no key depends on; rotate or "
    "revoke unused keys first."
)
_STORED = {True: "yes", False: "no", None: "the secret backend does not respond"}


class PepperVersionAdmin(ConsoleModelAdmin):
    view_permissions = (P.PEPPERS_READ,)
    menu, singular, plural = "Verifiers and health", "Pepper version", "Pepper versions"
    has_environments = False

    list_display = ("version_of_set", "stage", "since", "made_at")
    list_display_links = ("version_of_set",)
    list_filter = ("pepper_set",)
    ordering = ("pepper_set", "-number")

    def get_queryset(self, request: HttpRequest) -> QuerySet[PepperVersion]:
        """Return only the sets that this process serves; it may not read any other."""
        rows: QuerySet[PepperVersion] = super().get_queryset(request)
        return rows.filter(pepper_set__in=list_served_sets())

    @admin.display(description="version", ordering="number")
    def version_of_set(self, row: PepperVersion) -> str:
        return str(row)

    @admin.display(description="stage")
    def stage(self, row: PepperVersion) -> SafeString:
        return badge(_stage(row))

    @admin.display(description="used for digests from", ordering="hashes_from_at")
    def since(self, row: PepperVersion) -> SafeString:
        return moment(row.hashes_from_at, missing=_missing(row.number))

    made_at = moment_column("created", "created_at")

    def summary(self, row: PepperVersion) -> FactTable:
        return FactTable("Pepper version", [("Set", row.pepper_set), ("Version", row.number)])

    def detail(self, request: HttpRequest, row: PepperVersion) -> Detail:
        state = describe_version(row)
        return Detail(
            title=f"Pepper {row}",
            state=_stage(row),
            sections=[_times(state), _location_facts(state)],
            alarms=[state.fault] if state.fault else [],
            notes=[_NOTE],
        )


def _stage(row: PepperVersion) -> str:
    if row.destroyed_at is not None:
        return "destroyed"
    if row.retired_at is not None:
        return "retired"
    return "staged" if row.is_staged else "active"


def _missing(number: int) -> str:
    return "the start" if number == 1 else "not yet"


def _times(state: PepperState) -> FactTable:
    return FactTable(
        "Lifecycle",
        [
            ("Created", moment(state.created_at)),
            ("Used for digests from", moment(state.hashes_from_at, missing=_missing(state.number))),
            ("Processes that have not loaded it", ", ".join(state.lagging) or "none"),
            ("Used for digests now", "yes" if state.is_hashing else "no"),
            ("Retired", moment(state.retired_at)),
            ("Material can be destroyed from", moment(state.destroyable_from)),
            ("Material destroyed", moment(state.destroyed_at)),
        ],
    )


def _location_facts(state: PepperState) -> FactTable:
    return FactTable(
        "Location",
        [
            ("Loaded in this process, check value correct", "yes" if state.is_loaded else "no"),
            ("In the secret backend", _STORED[state.stored]),
        ],
    )
