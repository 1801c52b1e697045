"""Operators: no superuser, one person per login, and no write outside of the services."""

from collections.abc import Callable

import pytest
from django.contrib.auth.models import Group, Permission
from django.contrib.auth.signals import user_logged_in
from django.db import IntegrityError, transaction

from keyvault.access.roles import Role
from keyvault.models import Operator
from keyvault.models.recording import UnrecordedWriteError, collect_subjects
from tests.factories import PASSWORD, make_operator

pytestmark = [pytest.mark.database, pytest.mark.django_db]


def test_operator_made_superuser_is_refused() -> None:
    """There are no superusers; Django's own method cannot create one either."""
    with collect_subjects():
        with pytest.raises(IntegrityError, match="operator_no_superuser"), transaction.atomic():
            Operator.objects.create_superuser("root", password="correct horse battery staple")
        row = Operator.objects.create_user("tam")
        with pytest.raises(IntegrityError, match="operator_no_superuser"), transaction.atomic():
            row.compare_and_swap(is_superuser=True)


def test_operator_logins_are_different_persons_by_default() -> None:
    """Approvals compare persons: two logins share a person only when their creator says so."""
    with collect_subjects():
        first, second = Operator.objects.create_user("one"), Operator.objects.create_user("two")
    assert first.person != second.person


OPERATOR_WRITES: dict[str, Callable[[Operator], object]] = {
    "save": lambda row: row.save(),
    "save of a field": lambda row: row.save(update_fields=["is_active"]),
    "delete": lambda row: row.delete(),
    "swap": lambda row: row.compare_and_swap(is_active=False),
    "update": lambda row: Operator.objects.filter(pk=row.pk).update(is_active=False),
    "update through the base manager": lambda row: Operator._base_manager.filter(pk=row.pk).update(is_active=False),
    "bulk update": lambda row: Operator.objects.bulk_update([row], ["is_active"]),
    "bulk create": lambda row: Operator.objects.bulk_create([Operator(username="two")]),
    "delete of a set": lambda row: Operator.objects.filter(pk=row.pk).delete(),
    "create": lambda row: Operator.objects.create_user("two"),
    "roles set": lambda row: row.groups.set(Group.objects.all()),
    "role added": lambda row: row.groups.add(*Group.objects.all()[:1]),
    "roles cleared": lambda row: row.groups.clear(),
    "operators of a role": lambda row: Group.objects.all()[0].user_set.add(row),
    "Django's permissions": lambda row: row.user_permissions.set(Permission.objects.all()[:1]),
    "Django's sign-in": lambda row: user_logged_in.send(Operator, request=None, user=row),
    "Django's hash upgrade": lambda row: row.check_password(PASSWORD),
}


@pytest.mark.parametrize("how", OPERATOR_WRITES)
def test_operator_write_outside_services_is_refused(how: str) -> None:
    """No Django method changes an operator outside the audit log: without a recorded block nothing is written."""
    make_operator("tam", Role.AUDITOR)
    row = Operator.objects.get()
    before = Operator.objects.values().get()
    row.is_active = False
    with transaction.atomic():
        if how in {"Django's sign-in", "Django's hash upgrade"}:
            OPERATOR_WRITES[how](row)  # nothing is refused: no write is attempted
        else:
            with pytest.raises(UnrecordedWriteError):
                OPERATOR_WRITES[how](row)
    assert Operator.objects.values().get() == before
    assert row.roles == {Role.AUDITOR}
    assert not row.user_permissions.exists()
