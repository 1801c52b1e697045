"""A revocation is never the victim of a deadlock with a rotation of its key: keys are locked before rotations."""

from functools import partial

import pytest
from django.db import transaction

from keyvault.access.permissions import Permission as P
from keyvault.domain.errors import StateConflictError
from keyvault.domain.issuance import Delivery
from keyvault.domain.keys import KeyState
from keyvault.domain.revocation import RevocationReason
from keyvault.models import Key
from keyvault.services.keys.lifecycle import revoke_key
from keyvault.services.recording.authorization import authorize
from rotation.domain.plan_fields import PlanOverrides
from rotation.models import Rotation, ScheduledCredential
from rotation.services.rotations.engine import advance_rotation
from rotation.services.rotations.interventions import abort_rotation, collect_replacement
from rotation.services.rotations.reports import get_rotation
from rotation.services.rotations.requests import request_rotation
from rotation.services.schedules.date_marks import mark_credentials
from tests.factories import now
from tests.rotation import scene
from tests.services.racing import TIMEOUT_SECONDS, held_open, start, wait_until_blocked

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True)]


def _revoke(key: Key) -> None:
    grant = authorize(scene.admin(), P.KEYS_REVOKE, key.credential.account, now=now())
    revoke_key(grant, key, RevocationReason.KEY_COMPROMISE)


def test_revocation_during_a_request_waits_for_it() -> None:
    """The request's foreign key to the old key is checked when it commits, while the revocation holds that key."""
    key, _ = scene.issue(scene.account(), now())
    grant = authorize(scene.tam(), P.ROTATIONS_WRITE, key.credential.account, now=now())
    scene.admin()
    with held_open(partial(request_rotation, grant, key.credential, PlanOverrides(reason="yearly"))):
        revocation = start(partial(_revoke, Key.objects.get(pk=key.pk)))
        wait_until_blocked(revocation)
    revocation.result(TIMEOUT_SECONDS)
    assert Key.objects.get(pk=key.pk).state == KeyState.COMPROMISED


def test_revocation_during_an_abort_waits_for_it() -> None:
    """Both write the rotation's lease before the date of the credential's next rotation."""
    key, _ = scene.issue(scene.account(), now())
    mark_credentials([key.credential_id], now())
    assert ScheduledCredential.objects.exists()
    rotation = scene.rotate(key.credential, now())
    grant = authorize(scene.tam(), P.ROTATIONS_WRITE, key.credential.account, now=now())
    scene.admin()
    with held_open(partial(_revoke, Key.objects.get(pk=key.pk))):
        abort = start(partial(abort_rotation, grant, Rotation.objects.get(pk=rotation.pk), "not needed"))
        wait_until_blocked(abort)
    assert abort.exception(TIMEOUT_SECONDS) is None
    assert Key.objects.get(pk=key.pk).state == KeyState.COMPROMISED


def test_collection_during_a_revocation_holds_no_rotation_while_it_waits() -> None:
    """A lock on the rotation would be part of a deadlock with a transaction that has locked the key and needs it."""
    key, _ = scene.issue(scene.account(), now(), delivery=Delivery.SHOW_ONCE)
    rotation_id = scene.rotate(key.credential, now()).rotation_id
    advance_rotation(rotation_id)
    rotation = get_rotation(rotation_id)
    assert rotation.replacement is not None
    grant = authorize(scene.tam(), P.ISSUANCE_COLLECT, key.credential.account, now=now())
    scene.admin()
    with held_open(partial(_revoke, Key.objects.get(pk=rotation.replacement.pk))):
        collection = start(partial(collect_replacement, grant, rotation))
        wait_until_blocked(collection)
        with transaction.atomic():
            assert Rotation.objects.select_for_update(nowait=True).get(pk=rotation_id)
    assert isinstance(collection.exception(TIMEOUT_SECONDS), StateConflictError)
