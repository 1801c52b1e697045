"""What can be done in the console, as data: each act with its permission, its form and the service it calls.

The pages for all of them are built in one place, see `noun`, so that none can forget to ask.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from django import forms
from django.db.models import Model, QuerySet
from django.forms import BoundField

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission
from keyvault.admin.framework.widgets import FactTable
from keyvault.domain.errors import RequestInvalidError, StateConflictError
from keyvault.domain.plaintext import Plaintext
from keyvault.models import Account

if TYPE_CHECKING:
    _ModelChoiceField = forms.ModelChoiceField[Any]
else:
    _ModelChoiceField = forms.ModelChoiceField

Cleaned = dict[str, Any]


class Tone(StrEnum):
    """The colour of a button."""

    PLAIN = "plain"
    GOOD = "good"
    DANGER = "danger"


@dataclass(frozen=True, slots=True)
class ActionResult:
    """What an act came to. A `secret` is shown on the answer itself and nowhere else; `row` is what was made.

    `url`: the page that shows it, where that is not the row's. `beside`: what goes with the secret; `then`: the acts
    on the row that whoever has it does next. `is_partial`: some of it was not done, so that the page warns.
    """

    message: str
    secret: Plaintext | None = None
    row: Model | None = None
    url: str = ""
    beside: FactTable | None = None
    then: tuple[str, ...] = ()
    is_partial: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """Fields of a form that stand together, folded away behind the title while nothing is wrong in them."""

    title: str
    names: tuple[str, ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class FilledGroup:
    """A group as the page shows it."""

    group: Group
    fields: list[BoundField]
    is_open: bool


class ActForm(forms.Form):
    """What an act asks besides "are you sure". `initial_for` puts in what the page shows of the row.

    A long form names `groups`; what is in none of them stands before them.
    """

    required_css_class = "required"
    groups: tuple[Group, ...] = ()

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

    def show_faults(self, error: RequestInvalidError) -> None:
        """Puts each fault beside the field that it is about."""
        for fault in error.faults:
            name = fault.pointer.removeprefix("/")
            self.add_error(name if name in self.fields else None, fault.detail)


class SeenForm(ActForm):
    """Carries the version of the row that was shown: for acts that make something good again.

    What stops a key carries none. It is right whatever happened meanwhile, and must not be held up.
    """

    version = forms.IntegerField(widget=forms.HiddenInput)

    @classmethod
    def initial_for(cls, row: Any) -> dict[str, Any]:
        return {"version": row.version}


class RowChoice(_ModelChoiceField):
    """A choice among rows, each called as `words` says."""

    def __init__(self, queryset: QuerySet[Any], *, words: Callable[[Any], str], **options: Any) -> None:
        super().__init__(queryset, empty_label="Choose one", **options)
        self.words = words

    def label_from_instance(self, obj: Model) -> str:
        return self.words(obj)


class WhyForm(ActForm):
    why = forms.CharField(
        label="Why", max_length=300, widget=forms.Textarea(attrs={"rows": 3}), help_text="Kept in the audit log."
    )


class SeenWhyForm(SeenForm, WhyForm):
    """Both."""


def _always(row: Any) -> bool:
    return True


def _silent(row: Any) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class RowAction:
    """One thing to be done to one row, on a page of its own: shown by GET, done by POST.

    `fits` says whether the row's state lets it happen, `for_requester` that it is for whoever asked for the row:
    both show or hide the button, the service decides.
    `explain` tells what will happen, `warn` what speaks against it.
    """

    name: str
    label: str
    permission: Permission
    does: Callable[[Grant, Any, Cleaned], ActionResult]
    explain: Callable[[Any], str]
    form: type[ActForm] = ActForm
    fits: Callable[[Any], bool] = _always
    warn: Callable[[Any], str] = _silent
    tone: Tone = Tone.PLAIN
    for_requester: bool = False


@dataclass(frozen=True, slots=True)
class SecretView:
    """Something of a row that may be read again and again, on a page of its own. GET only."""

    name: str
    label: str
    permission: Permission
    reads: Callable[[Any], Plaintext]
    note: str
    fits: Callable[[Any], bool] = _always


@dataclass(frozen=True, slots=True)
class CreateAction:
    """One thing to be asked for that is no row yet. `account_of` says whose it will be; None: the platform's."""

    name: str
    label: str
    permission: Permission
    form: type[ActForm]
    does: Callable[[Grant, Cleaned], ActionResult]
    explain: str
    button: str
    account_of: Callable[[Cleaned], Account | None] = lambda cleaned: None
    preset: Callable[[Mapping[str, str]], dict[str, Any]] = lambda query: {}


def require_seen(row: Any, cleaned: Cleaned) -> None:
    """Raises StateConflictError when the form was made from another version of the row."""
    if "version" in cleaned and cleaned["version"] != row.version:
        raise StateConflictError("Somebody else changed this meanwhile. Look at it again.")
