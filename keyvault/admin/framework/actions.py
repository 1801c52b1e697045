"""Console actions as data: each names its permission, its form and the service that it calls.

`model_admin` builds the pages of all actions, so every page checks the permission of its action.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any

from django import forms
from django.db.models import Model, QuerySet
from django.forms import BoundField

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission
from keyvault.access.scopes import AccessScope
from keyvault.admin.framework.scoping import in_scope
from keyvault.admin.framework.widgets import FactTable
from keyvault.domain.environments import Environment
from keyvault.domain.errors import RequestInvalidError, StateConflictError
from keyvault.domain.plaintext import Plaintext
from keyvault.models import Account

if TYPE_CHECKING:
    _ModelChoiceField = forms.ModelChoiceField[Any]
else:
    _ModelChoiceField = forms.ModelChoiceField

Cleaned = dict[str, Any]


class Tone(StrEnum):
    """Color of a button."""

    PLAIN = "plain"
    GOOD = "good"
    DANGER = "danger"


@dataclass(frozen=True, slots=True)
class ActionResult:
    """Result of an action.

    Args:
        secret: shown in this response and nowhere else.
        row: the row that the action created.
        url: page to redirect to, if it is not the page of the row.
        beside: facts shown next to the secret.
        then: names of the row actions to offer next.
        is_partial: part of the work was not done; the page shows the message as a warning.
    """

    message: str
    secret: Plaintext | None = None
    row: Model | None = None
    url: str = ""
    beside: FactTable | None = None
    then: tuple[str, ...] = ()
    is_partial: bool = False


@dataclass(frozen=True, slots=True)
class ActionGroup:
    """A titled group of form fields, collapsed unless a field has an error."""

    title: str
    names: tuple[str, ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class FilledGroup:
    """A group with its bound fields, as the template renders it."""

    group: ActionGroup
    fields: list[BoundField]
    is_open: bool


class ScopedField(forms.Field):
    """Field whose valid values depend on the operator's scope."""

    def limit_to(self, scope: AccessScope) -> None:
        raise NotImplementedError


class ActionForm(forms.Form):
    """Base form of an action; without fields it only asks for confirmation.

    `initial_for` returns the initial values for a row. Fields that are in none of the `groups` come first.
    """

    required_css_class = "required"
    groups: tuple[ActionGroup, ...] = ()

    def limit_to(self, scope: AccessScope) -> None:
        """Accept only rows in the operator's scope; others are unknown to the form."""
        for field in self.fields.values():
            if isinstance(field, ScopedField):
                field.limit_to(scope)

    def ungrouped(self) -> list[BoundField]:
        grouped = {name for group in self.groups for name in group.names}
        return [field for field in self.visible_fields() if field.name not in grouped]

    def filled_groups(self) -> list[FilledGroup]:
        found = []
        for group in self.groups:
            fields = [self[name] for name in group.names]
            found.append(FilledGroup(group, fields, any(field.errors for field in fields)))
        return found

    @classmethod
    def initial_for(cls, row: Any) -> dict[str, Any]:
        return {}

    def find_environment(self) -> str:
        """Return the environment of a row that the form names, or the chosen one; empty: neither is known yet."""
        values = {name: str(self[name].value() or "") for name in self.fields}
        named = [
            field.find_environment(values[name])
            for name, field in self.fields.items()
            if isinstance(field, RowLookup) and values[name] and "\0" not in values[name]
        ]
        known = [*named, values.get("environment", "")]
        return next((each for each in known if each in set(Environment)), "")

    def show_faults(self, error: RequestInvalidError) -> None:
        """Add each fault to the field that it refers to."""
        for fault in error.faults:
            name = fault.pointer.removeprefix("/")
            self.add_error(name if name in self.fields else None, fault.detail)


class VersionedForm(ActionForm):
    """Form with the version of the row that the page showed, for actions that restore access.

    Actions that stop a key carry no version: a concurrent change must not delay them.
    """

    version = forms.IntegerField(widget=forms.HiddenInput)

    @classmethod
    def initial_for(cls, row: Any) -> dict[str, Any]:
        return {"version": row.version}


class UtcField(forms.DateTimeField):
    """Time in UTC, in the format of a `datetime-local` input."""

    widget = forms.DateTimeInput(attrs={"type": "datetime-local"}, format="%Y-%m-%dT%H:%M")

    def to_python(self, value: Any) -> Any:
        at = super().to_python(value)
        try:
            return None if at is None else at.astimezone(UTC)
        except OverflowError as error:
            raise forms.ValidationError(
                "The time is out of range. Use a date between the years 1 and 9999 in UTC."
            ) from error


class RowLookup(ScopedField, _ModelChoiceField):
    """Text field for the id of a row of a table that is too large for a list of choices.

    `account`: lookup of the row's account.
    """

    widget = forms.TextInput

    def __init__(self, queryset: QuerySet[Any], *, account: str, unknown: str, **options: Any) -> None:
        super().__init__(queryset, error_messages={"invalid_choice": unknown}, **options)
        self.rows, self.account = queryset, account

    def limit_to(self, scope: AccessScope) -> None:
        self.queryset = self.rows.filter(in_scope(scope, self.account))

    def find_environment(self, value: object) -> str:
        """Return the environment of the row with this id; empty: the operator may see no such row."""
        rows = self.rows if self.queryset is None else self.queryset
        try:
            found = rows.filter(pk=value).values_list(f"{self.account}__environment", flat=True).first()
        except (ValueError, TypeError, forms.ValidationError):
            return ""
        return str(found or "")


def reason_field(
    label: str = "Reason", *, required: bool = True, rows: int = 3, help_text: str = "Recorded in the audit log."
) -> forms.CharField:
    """Return the field for a reason in a person's own words."""
    return forms.CharField(
        label=label,
        required=required,
        max_length=300,
        widget=forms.Textarea(attrs={"rows": rows}),
        help_text=help_text,
    )


class ReasonForm(ActionForm):
    why = reason_field()


class VersionedReasonForm(VersionedForm, ReasonForm):
    """Form with the version of the row and a required reason."""


Text = str | Callable[[Any], str]
"""A text, or a function that writes it for a row."""


def format_text(text: Text, row: Any) -> str:
    return text if isinstance(text, str) else text(row)


Run = Callable[[Grant, Any, Cleaned], ActionResult]
"""Function that carries out an action on a row, with the values of its form."""


def _always(row: Any) -> bool:
    return True


def _silent(row: Any) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class RowAction:
    """An action on one row with its own page: GET shows the page, POST runs the action.

    Args:
        explain: describes the effect.
        is_available: whether the state of the row allows the action.
        warn: describes a reason against the action; empty for none.
        for_requester: only the person who requested the row may run the action.
        step_up: requires a recent second factor.

    `is_available` and `for_requester` only show or hide the button; the service enforces both.
    """

    name: str
    label: str
    permission: Permission
    run: Run
    explain: Text
    form: type[ActionForm] = ActionForm
    is_available: Callable[[Any], bool] = _always
    warn: Callable[[Any], str] = _silent
    tone: Tone = Tone.PLAIN
    for_requester: bool = False
    step_up: bool = False


@dataclass(frozen=True, slots=True)
class SecretView:
    """A page that shows a secret of a row and can be opened repeatedly, with a recent second factor. GET only."""

    name: str
    label: str
    permission: Permission
    read: Callable[[Grant, Any], Plaintext]
    note: str
    is_available: Callable[[Any], bool] = _always


@dataclass(frozen=True, slots=True)
class CreateAction:
    """An action that creates a row.

    Args:
        account_of: account that will own the row; None for a row of no particular account, whose accounts the service
            compares with the operator's scope.
        preset: initial form values from the query string.
        is_of_installation: the row concerns the whole installation, so the operator's scope must be unlimited.
        step_up: requires a recent second factor.
        is_once: a form that is sent twice creates one row: its page has a token, see `run_once`. The result has no
            secret.
    """

    name: str
    label: str
    permission: Permission
    form: type[ActionForm]
    run: Callable[[Grant, Cleaned], ActionResult]
    explain: str
    button: str
    account_of: Callable[[Cleaned], Account | None] = lambda cleaned: None
    preset: Callable[[Mapping[str, str]], dict[str, Any]] = lambda query: {}
    is_of_installation: bool = False
    step_up: bool = False
    is_once: bool = False


def run_service(service: Callable[..., object], done: Text) -> Run:
    """Return the `run` of an action that calls one service and reports what it did.

    Args:
        service: called with the grant and the row, and with the reason if the form has the field `why`.
        done: message for the row as the service left it.
    """

    def run(grant: Grant, row: Any, cleaned: Cleaned) -> ActionResult:
        service(grant, row, *([cleaned["why"]] if "why" in cleaned else []))
        return ActionResult(format_text(done, row))

    return run


pause_action = partial(RowAction, tone=Tone.DANGER)
"""Stops something until a `resume_action` restores it. Carries no version: a concurrent change must not delay it."""

resume_action = partial(RowAction, form=VersionedForm, tone=Tone.GOOD)
"""Restores what was stopped, for the version of the row that the page showed."""


def from_query(*names: str) -> Callable[[Mapping[str, str]], dict[str, Any]]:
    """Return the preset of a form whose fields have the names of the parameters in the query string."""
    return lambda query: {name: query.get(name) for name in names}


def run_action(action: RowAction, grant: Grant, row: Any, cleaned: Cleaned) -> ActionResult:
    """Run the action. Raises StateConflictError when the form was rendered from another version of the row."""
    if "version" in cleaned and cleaned["version"] != row.version:
        raise StateConflictError("This was changed by another operator. Review the current version and try again.")
    return action.run(grant, row, cleaned)
