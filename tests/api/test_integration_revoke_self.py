"""The holder of a leaked private key revokes it: immediately, in any state, repeatably."""

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from keyvault.access.decision import Grant
from keyvault.access.limits import REPEAT_LIMIT
from keyvault.access.permissions import Permission as P
from keyvault.access.principals import HOST, WORKER
from keyvault.access.roles import Role
from keyvault.domain.errors import DependencyUnavailableError, PermissionMissingError
from keyvault.domain.revocation import RevocationReason
from keyvault.models import AuditEntry, Change, Key
from keyvault.services.keys import lifecycle
from keyvault.services.limits import limiter
from keyvault.services.limits.limiter import Limiter
from keyvault.services.limits.stores import LocalStore, RedisStore
from keyvault.services.merchants.merchants import suspend_account, suspend_merchant
from keyvault.services.secrets.stored_copies import destroy_string
from tests.factories import account, grant, issue, now, the_operator

from .integration import ORDER, ORDERS, Ask, change_account, expect, holder_of, private, public

pytestmark = pytest.mark.django_db

URL = "/sandbox/credentials/revoke-self"


def admin_grant(permission: P) -> Grant:
    return grant(the_operator("admin", Role.KEY_ADMINISTRATOR), permission, account())


@pytest.mark.database
def test_revoke_self_ends_the_presented_key_and_no_other(ask: Ask) -> None:
    key, text = issue(account())
    other = private()
    ended = ask("POST", URL, key=text)
    assert ended.status_code == 202
    sequence = Change.objects.get(subject_id=key.key_id, at=Key.objects.get(pk=key.pk).compromised_at).sequence
    assert ended.body == {"key_id": key.key_id, "state": "compromised", "sequence": sequence}
    row = Key.objects.get(pk=key.pk)
    assert (row.state, row.reason, row.material) == ("compromised", "key_compromise", "destroy_due")
    expect(ask("POST", ORDERS, ORDER, key=text), 401, "key_revoked")
    assert ask("POST", ORDERS, ORDER, key=other).status_code == 201
    entry = AuditEntry.objects.get(event="key.compromised")
    assert (entry.chain_id, entry.actor) == ("account:acme/sandbox", f"key:{key.key_id}")


def test_revoke_self_repeated_answers_the_same_and_writes_nothing(ask: Ask) -> None:
    """A repetition must not fill the audit log."""
    key, text = issue(account())
    first = ask("POST", URL, key=text)
    row = Key.objects.get(pk=key.pk)
    written = AuditEntry.objects.count(), Change.objects.count()
    for body in (b"", b"{}", b" {}\n"):
        again = ask("POST", URL, body, key=text)
        assert (again.status_code, again.body) == (202, first.body)
    assert (AuditEntry.objects.count(), Change.objects.count()) == written
    assert Key.objects.get(pk=key.pk).version == row.version


@pytest.mark.database
def test_revoke_self_repeated_too_often_is_refused_until_the_limit_refills(ask: Ask) -> None:
    """Guarantee: a dead key can neither keep the database busy nor delay the revocation of another key."""
    key, text = issue(account())
    first = ask("POST", URL, key=text)
    for _ in range(REPEAT_LIMIT.count):
        assert ask("POST", URL, key=text).body == first.body
    with CaptureQueriesContext(connection) as made:
        refused = ask("POST", URL, key=text)
    expect(refused, 429, "rate_limited")
    assert "keyvault_change" not in " ".join(query["sql"] for query in made.captured_queries)
    assert 1 <= int(refused.headers["Retry-After"]) <= REPEAT_LIMIT.seconds
    assert refused.headers["RateLimit-Policy"] == f'"repeat";q={REPEAT_LIMIT.count};w={REPEAT_LIMIT.seconds}'
    assert refused.headers["RateLimit"].startswith('"repeat";r=0;t=')
    assert Key.objects.get(pk=key.pk).state == "compromised"
    # Repetitions are counted per authenticated key, from any address: another key of the account has its own count.
    _, other = issue(account())
    assert [ask("POST", URL, key=other).status_code for _ in range(2)] == [202, 202]


def test_revoke_self_is_counted_across_processes(ask: Ask, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guarantee: with a shared store, repetitions are counted once for all processes of the service."""
    _, text = issue(account())
    assert ask("POST", URL, key=text).status_code == 202
    found = []
    for _ in range(REPEAT_LIMIT.count + 1):
        # Each call runs in another process, with empty memory.
        process = Limiter(RedisStore(redis_url), LocalStore(), 100)
        monkeypatch.setattr(limiter, "limiter", lambda process=process: process)
        found.append(ask("POST", URL, key=text).status_code)
    assert found == [202] * REPEAT_LIMIT.count + [429]


def test_revoke_self_of_a_live_key_succeeds_with_an_empty_bucket(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guarantee: neither a counter nor a lost store keeps a leaked key alive."""

    def refuse(*args: object, **options: object) -> None:
        raise DependencyUnavailableError("the limits are away")

    monkeypatch.setattr(Limiter, "spend", refuse)
    key, text = issue(account())
    assert ask("POST", URL, key=text).status_code == 202
    superseded, another = issue(account())
    lifecycle.revoke_key(admin_grant(P.KEYS_REVOKE), superseded, RevocationReason.SUPERSEDED)
    assert ask("POST", URL, key=another).status_code == 202
    assert {Key.objects.get(pk=each.pk).state for each in (key, superseded)} == {"compromised"}


def test_revoke_self_is_never_rate_limited(ask: Ask) -> None:
    """A finder of the key cannot keep it alive by exhausting its quota."""
    change_account(limit_count=1, limit_seconds=3600)
    _, text = issue(account())
    assert ask("POST", ORDERS, ORDER, key=text).status_code == 201
    expect(ask("POST", ORDERS, ORDER, key=text), 429, "rate_limited")
    assert ask("POST", URL, key=text).status_code == 202


@pytest.mark.parametrize("stop", ["key", "account", "merchant", "superseded"])
def test_revoke_self_of_an_already_stopped_key_marks_it_compromised(ask: Ask, stop: str) -> None:
    """A suspension could be lifted, so the leaked key is revoked nevertheless."""
    key, text = issue(account())
    if stop == "key":
        lifecycle.suspend_key(admin_grant(P.KEYS_SUSPEND), key)
    elif stop == "account":
        suspend_account(grant(HOST, P.MERCHANTS_WRITE, account()), account())
    elif stop == "merchant":
        suspend_merchant(grant(HOST, P.MERCHANTS_WRITE), account().merchant)
    else:
        lifecycle.revoke_key(admin_grant(P.KEYS_REVOKE), key, RevocationReason.SUPERSEDED)
    assert ask("POST", ORDERS, ORDER, key=text).status_code in {401, 403}
    first, again = ask("POST", URL, key=text), ask("POST", URL, key=text)
    assert (first.status_code, first.body["state"]) == (202, "compromised")
    assert again.body == first.body


def test_revoke_self_of_an_inactive_or_expired_key_is_refused(ask: Ask) -> None:
    key, _ = issue(account())
    staged, text = lifecycle.stage_key(
        grant(WORKER, P.ISSUANCE_EXECUTE, account()), key.credential, expires_in_days=None
    )
    expect(ask("POST", URL, key=text), 401, "key_not_active")
    long_ago = now().replace(year=now().year - 1)
    expired, expired_text = issue(account(), expires_in_days=1, at=long_ago)
    expect(ask("POST", URL, key=expired_text), 401, "key_expired")
    for row in (staged, expired):
        assert Key.objects.get(pk=row.pk).state == row.state


def test_revoke_self_with_a_public_key_is_refused(ask: Ask) -> None:
    """A public key is known to every shopper, so it cannot revoke itself, in any state."""
    key, text = issue(account())
    shown = public()
    before = Key.objects.filter(state="active").count()
    expect(ask("POST", URL, key=shown), 403, "method_not_supported")
    suspend_account(grant(HOST, P.MERCHANTS_WRITE, account()), account())
    expect(ask("POST", URL, key=shown), 403, "merchant_suspended")
    expect(ask("POST", URL, bearer=text.reveal()), 401, "credential_missing")
    expect(ask("POST", URL.replace("sandbox", "production"), key=text), 401, "environment_mismatch")
    assert Key.objects.filter(state="active").count() == before
    assert Key.objects.get(pk=key.pk).state == "active"


def test_revoke_self_repeated_after_destruction_names_the_same_sequence(ask: Ask) -> None:
    """Later changes to the key do not change the sequence of its end."""
    key, text = issue(account())
    first = ask("POST", URL, key=text).body
    destroy_string(grant(WORKER, P.ISSUANCE_EXECUTE, account()), Key.objects.get(pk=key.pk))
    assert Key.objects.get(pk=key.pk).material == "destroyed"
    assert ask("POST", URL, key=text).body == first


def test_revoke_self_cannot_revoke_another_key_of_the_account(ask: Ask) -> None:
    """A holder of one leaked key has no rights over the merchant's other keys."""
    (mine, _), (other, _) = issue(account()), issue(account())
    allowed = grant(holder_of(mine), P.KEYS_REVOKE_SELF, account())
    with pytest.raises(PermissionMissingError):
        lifecycle.revoke_own_key(allowed, other)
    with pytest.raises(PermissionMissingError):
        lifecycle.revoke_own_key(grant(HOST, P.MERCHANTS_WRITE, account()), mine)
    for key in (mine, other):
        assert Key.objects.get(pk=key.pk).state == "active"
