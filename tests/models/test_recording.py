"""Rows that only a recorded transaction may write, and what each write alters."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.apps import apps
from django.db import IntegrityError, connection, models, transaction
from django.test.utils import CaptureQueriesContext

from keyvault.domain.errors import StateConflictError
from keyvault.domain.keystring import StringKind, StringScope
from keyvault.models import IssuanceRequest, Key, Merchant
from keyvault.models.recording import RecordedModel, UnrecordedWriteError, collect_subjects
from keyvault.services.catalog.catalog import find_endpoint
from keyvault.services.keys.records import prove_service_token
from keyvault.services.secrets.stored_copies import read_string
from keyvault.services.verification.judging import VerificationRequest, judge_presented
from tests.domain.minting import mint
from tests.factories import PRODUCTION, make_token, now

from .conftest import World

pytestmark = [pytest.mark.database, pytest.mark.django_db]


def recorded_models() -> Iterator[type[RecordedModel]]:
    """Yield every model that only a recorded transaction writes."""
    for model in apps.get_models():
        if issubclass(model, RecordedModel):
            yield model


def fresh_merchant() -> Merchant:
    return Merchant(merchant_id="initech", name="Initech", created_at=now())


WRITES: dict[str, Callable[[World], object]] = {
    "save of a new row": lambda _: fresh_merchant().save(),
    "save of an old row": lambda world: world.key.save(),
    "create": lambda _: Merchant.objects.create(merchant_id="initech", name="Initech", created_at=now()),
    "get_or_create": lambda _: Merchant.objects.get_or_create(merchant_id="x", defaults={"created_at": now()}),
    "update_or_create": lambda world: Merchant.objects.update_or_create(merchant_id="acme", defaults={"name": "x"}),
    "compare_and_swap": lambda world: world.key.compare_and_swap(state="suspended"),
    "delete": lambda world: world.key.delete(),
    "queryset.update": lambda _: Key.objects.update(state="suspended"),
    "queryset.delete": lambda _: Key.objects.all().delete(),
    "bulk_create": lambda _: Merchant.objects.bulk_create([fresh_merchant()]),
    "bulk_update": lambda world: Key.objects.bulk_update([world.key], ["state"]),
    "related.update": lambda world: world.key.credential.keys.update(state="suspended"),
    "related.create": lambda world: world.production.credentials.create(credential_id="crd_x", created_at=now()),
    "related.add": lambda world: world.sandbox.issuance_requests.add(world.pending),
    "related.clear": lambda world: world.key.requests.clear(),
    "base manager": lambda _: Key._base_manager.update(state="suspended"),
}

ALWAYS_REFUSED = {
    name for name in WRITES if name.startswith(("queryset", "bulk", "related.update", "related.add", "related.clear"))
} | {"delete", "base manager"}
"""Refused inside a recorded transaction as well: these writes name no subject."""


def test_recorded_model_written_outside_a_recorded_block_raises(world: World, subtests: pytest.Subtests) -> None:
    """No service can omit its audit entry: outside `recorded` every write raises."""
    for name, write in WRITES.items():
        with subtests.test(name), pytest.raises(UnrecordedWriteError):
            write(world)


def test_recorded_model_bulk_write_inside_a_recorded_block_raises(world: World, subtests: pytest.Subtests) -> None:
    """A bulk write cannot name the verdicts that it alters, so it is refused."""
    for name in ALWAYS_REFUSED:
        with subtests.test(name), collect_subjects(), pytest.raises(UnrecordedWriteError):
            WRITES[name](world)


def test_recorded_model_every_model_declares_what_it_alters() -> None:
    """Each model decides explicitly whether a write to it alters a verdict."""
    silent = [model.__name__ for model in recorded_models() if "alters" not in vars(model)]
    assert silent == []


def test_recorded_model_every_table_read_by_a_verdict_names_a_subject(world: World) -> None:
    """A row that a verdict depends on cannot be written without a change row, or caches would go stale."""
    _, token_text = make_token()
    key, customer_token = read_string(world.key).reveal(), mint(StringKind.CUSTOMER_TOKEN, StringScope.PRODUCTION)
    with CaptureQueriesContext(connection) as queries:
        for name, bearer in (("stays.search", None), ("customers.me", customer_token)):
            presented = VerificationRequest(key, PRODUCTION, find_endpoint(name), bearer=bearer)
            assert judge_presented(presented, now()).holder is not None
        assert prove_service_token(token_text.reveal(), now()) is not None
    read = {name for query in queries for name in re.findall(r'(?:FROM|JOIN) "(\w+)"', query["sql"])}
    altering = {
        model._meta.db_table
        for model in recorded_models()
        if (row := model._base_manager.first()) is not None and row.alters() is not None
    }
    assert read == {
        "keyvault_key",
        "keyvault_credential",
        "keyvault_account",
        "keyvault_merchant",
        "keyvault_servicetoken",
        "keyvault_customertoken",
        "keyvault_catalogendpoint",
        "keyvault_limitoverride",
    }
    assert read <= altering


def test_recorded_model_written_inside_a_block_notes_its_subject(world: World) -> None:
    """The write itself notes its subject; only models without a subject do not."""
    for model in recorded_models():
        row = model._base_manager.first()
        assert row is not None, f"the world lacks a {model.__name__}"
        if type(row).__name__ in {
            "IssuanceApproval",
            "RecipientKeyApproval",
            "RotationApproval",
            "CampaignApproval",
            "ScheduleApproval",
            "OperatorChangeApproval",
            "Evidence",
            "Installation",
        }:
            continue  # Append-only: nothing to swap.
        with transaction.atomic(), collect_subjects() as subjects:
            row.compare_and_swap()
        assert list(subjects) == ([] if row.alters() is None else [row.alters()]), model.__name__


def test_recorded_model_new_row_notes_its_subject() -> None:
    with transaction.atomic(), collect_subjects() as subjects:
        fresh_merchant().save()
    assert list(subjects) == [("merchant", "initech")]


def test_recorded_model_swap_of_a_stale_row_raises_and_writes_nothing(world: World) -> None:
    """A writer that decided on a stale row does not overwrite the newer one."""
    stale = IssuanceRequest.objects.get(pk=world.pending.pk)
    with collect_subjects():
        world.pending.compare_and_swap(state="withdrawn")
    with collect_subjects() as subjects, pytest.raises(StateConflictError):
        stale.compare_and_swap(state="rejected")
    assert subjects == {}
    fresh = IssuanceRequest.objects.get(pk=world.pending.pk)
    assert (fresh.state, fresh.version) == ("withdrawn", world.pending.version)


def test_recorded_model_save_of_an_existing_row_is_refused(world: World) -> None:
    """`save` only inserts; an update names the version that was read."""
    world.key.material = "destroyed"
    with collect_subjects(), pytest.raises(IntegrityError), transaction.atomic():
        world.key.save()
    assert Key.objects.get(pk=world.key.pk).material == "held"


def test_recorded_model_write_after_the_block_raises(world: World) -> None:
    with collect_subjects(), collect_subjects():
        pass
    with pytest.raises(UnrecordedWriteError):
        fresh_merchant().save()


def test_models_every_table_is_recorded_or_listed_as_exempt() -> None:
    """A new table is recorded, or this test states why it need not be."""
    beside = {
        "AuditChain": "the log itself",
        "AuditEntry": "the log itself",
        "AuditCheckpoint": "signs the log; an entry for each would be a change to sign again",
        "Change": "the feed itself",
        "ConsoleSession": "its sign-in and its end are recorded",
        "RoleUse": "when a role was last used; its grant and its end are recorded with the operator",
        "KeyUse": "counts, no part of a verdict",
        "KeySource": "what is kept of a source's uses",
        "KeyAttempt": "when it was last tried, no part of a verdict",
        "UseContext": "whose uses are counted",
        "UseBucket": "counts",
        "UsageTotal": "sums of such counts",
        "UsageReporter": "who counts",
        "Verifier": "a process that decides from memory, and its position in the feed",
        "FeedReader": "which of these read the feed over HTTP, and how far it was offered to them",
        "Confirmation": "when it arrived",
        "IdempotentRequest": "stored answers; claiming a key is no operator's act",
        "Refusal": "what was refused, for support; no part of a verdict",
        "ServiceProcess": "when a worker or beat was last seen",
        "WorkLease": "bookkeeping beside the recorded rows",
        "LedgerEntry": "bookkeeping of tries",
        "AlarmDelivery": "bookkeeping of tries",
        "WebhookBreaker": "bookkeeping of tries",
        "WebhookDelivery": "bookkeeping of tries",
        "CampaignMember": "bookkeeping; each rotation that it gets is recorded",
        "ScheduledCredential": "a date computed from recorded rows; each rotation that it leads to is recorded",
        "ScheduleSweep": "bookkeeping of such computations",
        "ScheduleCheck": "bookkeeping; each fault that it finds is recorded",
    }
    unguarded = {model.__name__ for model in _ours() if not issubclass(model, RecordedModel)}
    assert unguarded == set(beside)


def _ours() -> list[type[models.Model]]:
    found: list[Any] = [model for name in ("keyvault", "rotation") for model in apps.get_app_config(name).get_models()]
    return found
