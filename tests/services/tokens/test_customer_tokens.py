"""Customer access tokens: hashed, bound to account and customer, short-lived, and revocable."""

from datetime import timedelta

import pytest

from keyvault.access.customers import Customer, CustomerFault, judge_customer_token, read_customer_token
from keyvault.access.permissions import Permission as P
from keyvault.access.principals import KeyHolder
from keyvault.domain.audit import Break, ChainedEntry, customer_token_chains
from keyvault.domain.checkpoints import Head, parse_checkpoint
from keyvault.domain.digests import PEPPER_SET
from keyvault.domain.errors import NotFoundError, PermissionMissingError, RequestInvalidError
from keyvault.domain.keys import KeyKind
from keyvault.domain.plaintext import Plaintext
from keyvault.models import AuditChain, AuditEntry, CustomerToken, Key
from keyvault.services.audit.checkpoints import find_newest, sign_due
from keyvault.services.audit.export import export_log
from keyvault.services.keys.records import find_customer_record
from keyvault.services.peppers.ring import load_peppers
from keyvault.services.recording.audit_chain import AuditReport, verify_audit
from keyvault.services.tokens.customer_tokens import issue_customer_token, revoke_customer_token
from tests.domain.minting import mint
from tests.factories import SANDBOX, account, grant, issue, make_merchant, now
from tests.services.conftest import Scene
from tests.services.rows import disable_triggers, last_body, last_ids, written_since

pytestmark = pytest.mark.django_db


def holder_of(key: Key) -> KeyHolder:
    """Return the principal of the key's holder."""
    credential = key.credential
    kind, merchant_id = KeyKind(credential.kind), credential.account.merchant_id
    return KeyHolder(key.key_id, credential.credential_id, kind, credential.environment, merchant_id)


def token_of(key: Key, customer_id: str = "alice", ttl_seconds: int | None = None) -> tuple[CustomerToken, Plaintext]:
    place = key.credential.account
    allowed = grant(holder_of(key), P.CUSTOMER_TOKENS_WRITE, place)
    return issue_customer_token(allowed, place, key, customer_id=customer_id, ttl_seconds=ttl_seconds)


def judge(text: Plaintext, key: Key) -> Customer | CustomerFault:
    keystring = read_customer_token(text.reveal(), environment=SANDBOX, key_prefix="kv")
    assert not isinstance(keystring, CustomerFault)
    record = find_customer_record(keystring.key_id)
    return judge_customer_token(keystring, record, holder_of(key), load_peppers(PEPPER_SET[SANDBOX]), now())


@pytest.mark.database
def test_customer_token_is_valid_with_keys_of_its_account_only(scene: Scene) -> None:
    key, _ = issue(scene.sandbox)
    token, text = token_of(key)
    assert judge(text, key) == Customer("alice", token.token_id, token.expires_at)
    make_merchant("globex")
    other, _ = issue(account("globex"))
    assert judge(text, other) is CustomerFault.INVALID


def test_customer_token_issued_writes_one_entry_one_change_and_no_plaintext(scene: Scene) -> None:
    """The row holds a digest; the permanent log names the token, its customer and the issuing key."""
    key, _ = issue(scene.sandbox)
    before = last_ids()
    token, text = token_of(key, ttl_seconds=60)
    assert written_since(before) == (["customer_token.issued"], [("customer_token", token.token_id)])
    body = last_body("customer_token.issued")
    assert body["actor"] == f"key:{key.key_id}"
    assert body["details"] == {"token_id": token.token_id, "customer_id": "alice", "ttl_seconds": 60}
    assert token.issued_with == key
    assert text.reveal()[-49:] not in str(vars(CustomerToken.objects.get()))


def test_customer_token_entries_have_chains_of_their_own_that_are_signed_and_exported(scene: Scene) -> None:
    """Neither verification nor a checkpoint nor an export omits them."""
    key, _ = issue(scene.sandbox)
    token, _ = token_of(key)
    (entry,) = AuditEntry.objects.filter(event="customer_token.issued")
    assert entry.chain_id in customer_token_chains("account:acme/sandbox")
    assert verify_audit() == AuditReport(AuditEntry.objects.count(), None)
    sign_due(now())
    signed = find_newest("sandbox")
    assert signed is not None
    assert parse_checkpoint(signed.body).heads[entry.chain_id] == Head(1, bytes(entry.hash))
    exported = [record for record in export_log(["sandbox"], None, now()) if isinstance(record, ChainedEntry)]
    assert token.token_id.encode() in next(record.body for record in exported if record.chain == entry.chain_id)


@pytest.mark.database
def test_customer_token_chain_removed_is_reported(scene: Scene) -> None:
    """An empty chain is missing, too: every account has all of its chains from the beginning."""
    disable_triggers()
    AuditChain.objects.filter(name="customer_tokens.3:acme/production").delete()
    assert verify_audit().first_broken == Break("customer_tokens.3:acme/production", 0, "the chain is missing")


@pytest.mark.parametrize(
    ("requested", "bound", "expected"), [(None, 3600, 900), (None, 60, 60), (None, 900, 900), (1, 60, 1), (60, 60, 60)]
)
def test_customer_token_lifetime_is_as_requested_or_fifteen_minutes_within_the_bound(
    scene: Scene, requested: int | None, bound: int, expected: int
) -> None:
    key, _ = issue(scene.sandbox)
    key.credential.account.customer_token_seconds = bound
    token, _ = token_of(key, ttl_seconds=requested)
    assert token.expires_at - token.created_at == timedelta(seconds=expected)


@pytest.mark.parametrize(
    ("customer_id", "ttl_seconds", "pointer"),
    [
        ("alice", 0, "/ttl_seconds"),
        ("alice", 3601, "/ttl_seconds"),
        ("a" * 129, None, ""),
        ("..", None, ""),
        ("a/b", None, ""),
        (mint(), None, ""),
    ],
)
def test_customer_token_with_invalid_fields_is_refused(
    scene: Scene, customer_id: str, ttl_seconds: int | None, pointer: str
) -> None:
    key, _ = issue(scene.sandbox)
    with pytest.raises(RequestInvalidError) as refused:
        token_of(key, customer_id, ttl_seconds)
    assert [fault.pointer for fault in refused.value.faults] == [pointer]
    assert mint() not in str(refused.value.faults)
    assert not CustomerToken.objects.exists()


def test_customer_token_requested_with_a_public_key_is_refused(scene: Scene) -> None:
    public, _ = issue(scene.sandbox, kind=KeyKind.PUBLIC)
    with pytest.raises(PermissionMissingError):
        token_of(public)


def test_customer_token_revoked_twice_is_recorded_once(scene: Scene) -> None:
    key, _ = issue(scene.sandbox)
    token, text = token_of(key)
    allowed = grant(holder_of(key), P.CUSTOMER_TOKENS_WRITE, scene.sandbox)
    before = last_ids()
    for _ in range(2):
        revoke_customer_token(allowed, scene.sandbox, token.token_id)
    assert judge(text, key) is CustomerFault.REVOKED
    assert written_since(before) == (["customer_token.revoked"], [("customer_token", token.token_id)])
    assert last_body("customer_token.revoked")["details"] == {"token_id": token.token_id, "customer_id": "alice"}
    assert CustomerToken.objects.get().revoked_at == allowed.at


def test_customer_token_of_another_account_is_not_found(scene: Scene) -> None:
    make_merchant("globex")
    key, _ = issue(scene.sandbox)
    token, text = token_of(key)
    for place in (scene.production, account("globex")):
        other, _ = issue(place)
        with pytest.raises(NotFoundError):
            revoke_customer_token(grant(holder_of(other), P.CUSTOMER_TOKENS_WRITE, place), place, token.token_id)
    assert isinstance(judge(text, key), Customer)
