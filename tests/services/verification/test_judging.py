"""Judgements against the database: verdicts, spent limits, recorded uses, and what a caller may learn."""

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import pytest
from django.db import InterfaceError, OperationalError

from keyvault.access.catalog import BUILT_IN, Endpoint, LimiterFailurePolicy, NoMatchingEndpoint
from keyvault.access.decision import Check, Denial, Grant
from keyvault.access.endpoints import EndpointDraft
from keyvault.access.limits import FAILED_PROOF_LIMIT, Limit
from keyvault.access.permissions import Permission as P
from keyvault.access.principals import WORKER, KeyHolder
from keyvault.access.roles import Role
from keyvault.domain.environments import Environment
from keyvault.domain.errors import ErrorCode
from keyvault.domain.keys import KeyKind
from keyvault.domain.keystring import StringKind, StringScope, checksum
from keyvault.domain.revocation import RevocationReason
from keyvault.models import Account, Key
from keyvault.models.keys import OriginHeader
from keyvault.models.usage import UseOutcome
from keyvault.services.catalog.catalog import find_endpoint
from keyvault.services.catalog.endpoints import add_endpoint
from keyvault.services.keys.credentials import restrict_credential
from keyvault.services.keys.lifecycle import activate_key, revoke_key, stage_key, suspend_key
from keyvault.services.limits import limiter
from keyvault.services.limits.overrides import set_account_limit, set_endpoint_limit
from keyvault.services.limits.stores import LimitStoreLostError, LocalStore
from keyvault.services.tokens.customer_tokens import issue_customer_token, revoke_customer_token
from keyvault.services.usage.recorder import UsageLog
from keyvault.services.verification.judging import (
    Judgement,
    VerificationRequest,
    explain_described,
    judge_presented,
    note_use,
)
from tests.domain.minting import mint
from tests.factories import PRODUCTION, SANDBOX, account, grant, issue, make_merchant, now, the_operator
from tests.starting_rows import start_with

pytestmark = pytest.mark.django_db

HOUR = 3600

ADDRESS, ELSEWHERE = "192.0.2.9", "198.51.100.7"
RETRIEVE, CREATE = BUILT_IN.find("orders.retrieve"), BUILT_IN.find("orders.create")
ME, REVOKE_SELF = BUILT_IN.find("customers.me"), BUILT_IN.find("credentials.revoke_self")
TEN = Limit(10, HOUR)


@dataclass(frozen=True)
class JudgingScene:
    """Merchant `acme` with a private key and a limit of ten an hour; every judgement happens at `at`."""

    account: Account
    key: Key
    text: str
    at: datetime

    @property
    def request(self) -> VerificationRequest:
        """A request that is allowed."""
        return VerificationRequest(key=self.text, environment=SANDBOX, endpoint=CREATE, client_address=ADDRESS)

    def judge(self, **changes: Any) -> Judgement:
        return judge_presented(replace(self.request, **changes), self.at)

    def remaining(self) -> int:
        """Return the account's remaining tokens, measured by spending one."""
        spend = self.judge().spend
        assert spend is not None
        return spend.statuses[0].remaining + 1


@pytest.fixture(autouse=True)
def frozen_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freeze the clock of all limits, so that none returns tokens during a test."""
    accounts = limiter.Limiter(LocalStore(lambda: 0), None, 100)
    proofs = limiter.FailedProofs(limiter.Limiter(LocalStore(lambda: 0), None, 100), lambda: 0.0)
    monkeypatch.setattr("keyvault.services.verification.judging.limiter", lambda: accounts)
    monkeypatch.setattr("keyvault.services.verification.judging.failed_proofs", lambda: proofs)


@pytest.fixture
def scene(db: None) -> JudgingScene:
    return start_with(_make_scene)


def _make_scene() -> JudgingScene:
    make_merchant("acme")
    key, text = issue(account())
    set_account_limit(admin_grant(P.LIMITS_WRITE, account()), account(), TEN)
    return JudgingScene(account(), key, text.reveal(), now())


def admin_grant(permission: P, of: Account | None = None) -> Grant:
    return grant(the_operator("admin", Role.KEY_ADMINISTRATOR), permission, of)


def verdict_code(judgement: Judgement) -> str:
    return judgement.verdict.code.value if isinstance(judgement.verdict, Denial) else "allowed"


def forged(text: str) -> str:
    """Return a key string with the same id, another secret and a valid checksum."""
    head = text[:27] + mint(seed="another")[27:70]
    return head + checksum(head)


def activate_replacement(key: Key) -> str:
    """Activate a second key of the credential, as a rotation does."""
    allowed = grant(WORKER, P.ROTATIONS_ADVANCE, key.credential.account)
    staged, text = stage_key(allowed, key.credential, expires_in_days=None)
    activate_key(allowed, staged)
    return text.reveal()


def add_catalog_endpoint(**rule: Any) -> Endpoint:
    draft = EndpointDraft("refunds.create", "POST", "/refunds", frozenset({KeyKind.PRIVATE}), **rule)
    add_endpoint(admin_grant(P.CATALOG_WRITE), draft)
    found = find_endpoint("refunds.create")
    assert isinstance(found, Endpoint)
    return found


# --- spending ---------------------------------------------------------------------------------------------


@pytest.mark.database
def test_limit_of_ten_refuses_the_eleventh_request(scene: JudgingScene) -> None:
    assert [verdict_code(scene.judge()) for _ in range(10)] == ["allowed"] * 10
    judgement = scene.judge()
    assert verdict_code(judgement) == "rate_limited"
    assert isinstance(judgement.verdict, Denial)
    assert judgement.verdict.retry_after_seconds is not None
    assert 1 <= judgement.verdict.retry_after_seconds <= HOUR
    assert judgement.holder is not None
    assert judgement.spend is not None
    assert judgement.trace[-1] == Check(ErrorCode.RATE_LIMITED, False)


DENIED: dict[str, dict[str, Any]] = {
    "credential_in_url": {"url": f"/orders?key={mint()}"},
    "credential_ambiguous": {"bearer": "a,b"},
    "environment_mismatch": {"environment": PRODUCTION},
    "merchant_mismatch": {"merchant": "globex"},
    "endpoint_unknown": {"endpoint": NoMatchingEndpoint()},
    "method_not_allowed": {"endpoint": NoMatchingEndpoint(("GET",))},
    "method_not_supported": {"endpoint": BUILT_IN.find("client.configuration")},
    "bearer_not_supported": {"bearer": "x"},
    "private_key_in_browser": {"origin": "https://shop.example"},
    "customer_token_missing": {"endpoint": ME},
    "customer_token_invalid": {"endpoint": ME, "bearer": "x"},
}


UNPROVED = ("credential_in_url", "credential_ambiguous", "environment_mismatch")


@pytest.mark.parametrize("denied", DENIED)
def test_limit_is_not_spent_by_a_denied_request(scene: JudgingScene, denied: str) -> None:
    """A misconfigured client does not exhaust its limit."""
    for _ in range(3):
        assert verdict_code(scene.judge(**DENIED[denied])) == denied
    assert scene.remaining() == 10


def test_limit_that_refuses_spends_from_neither_bucket(scene: JudgingScene) -> None:
    set_endpoint_limit(
        admin_grant(P.LIMITS_WRITE, scene.account), SANDBOX, "orders.create", Limit(1, HOUR), scene.account
    )
    assert [verdict_code(scene.judge()) for _ in range(4)] == [
        "allowed",
        "rate_limited",
        "rate_limited",
        "rate_limited",
    ]
    spend = scene.judge(endpoint=RETRIEVE).spend
    assert spend is not None
    assert [(each.policy, each.remaining) for each in spend.statuses] == [("account", 8)]


@pytest.mark.parametrize("text", [None, "", "nonsense", mint(seed="unknown"), mint()[:-6] + "000000"])
def test_limit_is_not_spent_without_proof(scene: JudgingScene, text: str | None) -> None:
    assert scene.judge(key=text).spend is None
    assert scene.remaining() == 10


def test_limit_is_not_spent_by_a_wrong_secret(scene: JudgingScene) -> None:
    """A caller who knows a key's public id cannot exhaust its owner's limit."""
    for _ in range(12):
        assert verdict_code(scene.judge(key=forged(scene.text))) == "credential_invalid"
    assert scene.remaining() == 10


def test_limit_and_failed_proofs_are_not_spent_by_a_dry_run(scene: JudgingScene) -> None:
    for _ in range(12):
        assert verdict_code(scene.judge(is_dry=True)) == "allowed"
    assert scene.judge(is_dry=True).spend is None
    assert scene.remaining() == 10
    for _ in range(FAILED_PROOF_LIMIT.count + 1):
        judgement = scene.judge(key="x", is_dry=True)
    assert isinstance(judgement.verdict, Denial)
    assert judgement.verdict.retry_after_seconds is None


def test_limit_is_shared_by_both_keys_of_a_rotation(scene: JudgingScene) -> None:
    """A rotation neither doubles a limit nor halves it at its end."""
    other = activate_replacement(scene.key)
    for _ in range(5):
        assert verdict_code(scene.judge()) == "allowed"
        assert verdict_code(scene.judge(key=other)) == "allowed"
    assert verdict_code(scene.judge()) == verdict_code(scene.judge(key=other)) == "rate_limited"


def test_limit_of_public_keys_is_separate_from_that_of_private_keys(scene: JudgingScene) -> None:
    _, public = issue(scene.account, kind=KeyKind.PUBLIC)
    public_request = {"key": public.reveal(), "endpoint": BUILT_IN.find("client.configuration")}
    assert [verdict_code(scene.judge(**public_request)) for _ in range(11)] == ["allowed"] * 10 + ["rate_limited"]
    assert scene.remaining() == 10


def test_limit_when_exhausted_does_not_block_a_self_revocation(scene: JudgingScene) -> None:
    """A finder of the key cannot prevent its owner from revoking it."""
    for _ in range(10):
        scene.judge()
    assert verdict_code(scene.judge()) == "rate_limited"
    judgement = scene.judge(endpoint=REVOKE_SELF)
    assert verdict_code(judgement) == "allowed"
    assert judgement.spend is None


def test_limit_is_spent_for_the_full_cost_or_not_at_all(scene: JudgingScene) -> None:
    assert verdict_code(scene.judge(cost=8)) == "allowed"
    assert verdict_code(scene.judge(cost=3)) == "rate_limited"
    assert verdict_code(scene.judge(cost=2)) == "allowed"


@pytest.mark.parametrize("is_dry", [False, True])
def test_cost_above_the_burst_is_invalid_and_names_the_burst(scene: JudgingScene, is_dry: bool) -> None:
    """Waiting would not help, so there is no Retry-After; a dry run is denied too."""
    verdict = scene.judge(cost=11, is_dry=is_dry).verdict
    assert isinstance(verdict, Denial)
    assert verdict.code is ErrorCode.REQUEST_INVALID
    assert "10" in verdict.detail
    assert verdict.retry_after_seconds is None
    assert scene.remaining() == 10


# --- changed limits ---------------------------------------------------------------------------------------


def test_limit_changed_back_starts_full(scene: JudgingScene) -> None:
    """An exhausted limit of another scope with the same numbers is not shared."""
    tight = Limit(1, HOUR)
    for _ in range(2):
        set_endpoint_limit(admin_grant(P.LIMITS_WRITE, scene.account), SANDBOX, "orders.create", tight, scene.account)
        assert isinstance(scene.judge().verdict, Grant)
        assert isinstance(scene.judge().verdict, Denial)
        set_endpoint_limit(admin_grant(P.LIMITS_WRITE, scene.account), SANDBOX, "orders.create", None, scene.account)
    set_endpoint_limit(admin_grant(P.LIMITS_WRITE, None), SANDBOX, "orders.create", tight)
    assert isinstance(scene.judge().verdict, Grant)


# --- precedence -------------------------------------------------------------------------------------------


def test_limit_of_the_pair_precedes_the_endpoint_s_and_the_catalog_s(scene: JudgingScene) -> None:
    endpoint = add_catalog_endpoint(limit_count=5, limit_seconds=HOUR)
    make_merchant("globex")

    def in_force() -> int | None:
        spend = scene.judge(endpoint=endpoint).spend
        assert spend is not None
        return {each.policy: each.limit.count for each in spend.statuses}.get("endpoint")

    def set_limit(count: int | None, of: Account | None, environment: Environment = SANDBOX) -> None:
        limit = None if count is None else Limit(count, HOUR)
        set_endpoint_limit(admin_grant(P.LIMITS_WRITE, of), environment, endpoint.name, limit, of)

    assert in_force() == 5
    set_limit(9, account("globex"))
    set_limit(8, None, PRODUCTION)
    assert in_force() == 5
    set_limit(7, None)
    assert in_force() == 7
    set_limit(6, scene.account)
    assert in_force() == 6
    set_limit(None, None)
    assert in_force() == 6
    set_limit(None, scene.account)
    assert in_force() == 5


def test_limit_of_an_endpoint_without_one_is_the_account_s(scene: JudgingScene) -> None:
    spend = scene.judge().spend
    assert spend is not None
    assert [(each.policy, each.limit) for each in spend.statuses] == [("account", TEN)]


def test_limit_of_an_account_without_one_is_the_environment_s_default(scene: JudgingScene) -> None:
    set_account_limit(admin_grant(P.LIMITS_WRITE, scene.account), account(), None)
    spend = scene.judge().spend
    assert spend is not None
    assert spend.statuses[0].limit == Limit(25, 1)
    _, text = issue(account(environment=PRODUCTION))
    spend = scene.judge(key=text.reveal(), environment=PRODUCTION).spend
    assert spend is not None
    assert spend.statuses[0].limit == Limit(100, 1)


def test_limit_of_an_account_changed_starts_full(scene: JudgingScene) -> None:
    for _ in range(10):
        scene.judge()
    set_account_limit(admin_grant(P.LIMITS_WRITE, account()), account(), Limit(11, HOUR))
    spend = scene.judge().spend
    assert spend is not None
    assert spend.statuses[0].remaining == 10


class LostStore:
    def spend(self, buckets: object, cost: int) -> Any:
        raise LimitStoreLostError("gone")


@pytest.mark.parametrize(
    ("on_loss", "expected"),
    [(LimiterFailurePolicy.LOCAL_SHARE, "allowed"), (LimiterFailurePolicy.REFUSE, "dependency_unavailable")],
)
def test_limit_with_the_store_lost_follows_the_endpoint_s_policy(
    scene: JudgingScene, monkeypatch: pytest.MonkeyPatch, on_loss: LimiterFailurePolicy, expected: str
) -> None:
    """The limit is never lifted: a share of it applies, or every request is denied except a self-revocation."""
    endpoint = add_catalog_endpoint(on_limiter_loss=on_loss)
    lost = limiter.Limiter(LostStore(), LocalStore(lambda: 0), fallback_percent=50)
    monkeypatch.setattr("keyvault.services.verification.judging.limiter", lambda: lost)
    codes = [verdict_code(scene.judge(endpoint=endpoint)) for _ in range(6)]
    assert codes == [expected] * 5 + ["rate_limited" if expected == "allowed" else expected]
    verdict = scene.judge(endpoint=endpoint).verdict
    assert isinstance(verdict, Denial)
    assert verdict.holder is not None
    assert verdict.retry_after_seconds is not None
    assert verdict.retry_after_seconds >= 1
    assert verdict_code(scene.judge(endpoint=REVOKE_SELF)) == "allowed"


# --- failed proofs ----------------------------------------------------------------------------------------


def failed_proof_texts(text: str) -> dict[str, str]:
    return {
        "malformed": "nonsense",
        "wrong checksum": text[:-6] + "000000",
        "service token": mint(StringKind.SERVICE_TOKEN, StringScope.ALL),
        "unknown": mint(seed="unknown"),
        "wrong secret": forged(text),
    }


def retry_after(judgement: Judgement) -> int | None:
    assert isinstance(judgement.verdict, Denial)
    assert judgement.verdict.code is ErrorCode.CREDENTIAL_INVALID
    return judgement.verdict.retry_after_seconds


def test_failed_proofs_beyond_a_hundred_get_a_retry_after(scene: JudgingScene) -> None:
    """Failed proofs are limited by address, whatever their kind; a valid key from that address still passes."""
    texts = list(failed_proof_texts(scene.text).values())
    for number in range(FAILED_PROOF_LIMIT.count):
        assert retry_after(scene.judge(key=texts[number % len(texts)])) is None
    for text in texts:
        seconds = retry_after(scene.judge(key=text))
        assert seconds is not None
        assert 1 <= seconds <= FAILED_PROOF_LIMIT.seconds
    assert verdict_code(scene.judge()) == "allowed"
    assert retry_after(scene.judge(key="x", client_address=ELSEWHERE)) is None
    assert retry_after(scene.judge(key="x", client_address=None)) is None


@pytest.mark.parametrize("kind", ["malformed", "wrong checksum", "service token", "unknown", "wrong secret"])
def test_failed_proofs_of_each_kind_are_counted(scene: JudgingScene, kind: str) -> None:
    """A free kind of guess would be the one that attackers use."""
    text = failed_proof_texts(scene.text)[kind]
    for _ in range(FAILED_PROOF_LIMIT.count):
        assert retry_after(scene.judge(key=text)) is None
    assert retry_after(scene.judge(key=text)) is not None


def test_failed_proofs_do_not_include_other_denials(scene: JudgingScene) -> None:
    """A missing key, a key of the other environment and a proved but suspended key do not count."""
    suspend_key(admin_grant(P.KEYS_SUSPEND, scene.account), scene.key)
    for _ in range(FAILED_PROOF_LIMIT.count):
        assert verdict_code(scene.judge(key=None)) == "credential_missing"
        assert verdict_code(scene.judge(environment=PRODUCTION)) == "environment_mismatch"
        assert verdict_code(scene.judge()) == "key_not_active"
    assert retry_after(scene.judge(key="x")) is None


def test_failed_proofs_above_the_limit_reveal_nothing_more(scene: JudgingScene) -> None:
    """Malformed, unknown and wrong keys get the same 401 with Retry-After."""
    for _ in range(FAILED_PROOF_LIMIT.count):
        scene.judge(key="x")
    verdicts = [scene.judge(key=text).verdict for text in failed_proof_texts(scene.text).values()]
    replies = {(each.code, each.detail, each.internal, each.holder) for each in verdicts if isinstance(each, Denial)}
    assert len(verdicts) == len(failed_proof_texts(scene.text))
    assert replies == {(ErrorCode.CREDENTIAL_INVALID, "The API key is not valid.", "", None)}


# --- scope ------------------------------------------------------------------------------------------------


def test_scope_without_the_key_s_merchant_denies_it_as_unknown(scene: JudgingScene) -> None:
    """The judgement equals that of an unknown key: no identity and no spent limit."""
    foreign = scene.judge(scope=frozenset({"globex"}))
    unknown = scene.judge(key=mint(seed="unknown"), scope=frozenset({"globex"}))
    assert foreign == unknown
    assert (foreign.holder, foreign.record, foreign.spend) == (None, None, None)
    assert foreign.trace == [Check(ErrorCode.CREDENTIAL_INVALID, False)]
    assert scene.remaining() == 10
    assert verdict_code(scene.judge(scope=frozenset({"acme", "globex"}))) == "allowed"
    assert verdict_code(scene.judge(scope=frozenset())) == "credential_invalid"


def test_scope_without_the_key_s_merchant_counts_a_failed_proof(scene: JudgingScene) -> None:
    """Otherwise the failed-proof limiter would distinguish a foreign key from an unknown one."""
    for _ in range(FAILED_PROOF_LIMIT.count):
        scene.judge(scope=frozenset({"globex"}))
    assert retry_after(scene.judge(scope=frozenset({"globex"}))) is not None


def test_scope_without_the_key_s_merchant_hides_a_suspension(scene: JudgingScene) -> None:
    suspend_key(admin_grant(P.KEYS_SUSPEND, scene.account), scene.key)
    assert verdict_code(scene.judge()) == "key_not_active"
    assert scene.judge(scope=frozenset({"globex"})) == scene.judge(
        key=mint(seed="unknown"), scope=frozenset({"globex"})
    )


# --- an unavailable database ------------------------------------------------------------------------------


@pytest.mark.database
@pytest.mark.postgres_once
@pytest.mark.parametrize("error", [OperationalError, InterfaceError])
@pytest.mark.parametrize("read", ["find_key_record", "find_customer_record", "endpoint_limit"])
def test_database_lost_denies_as_stale(
    scene: JudgingScene, monkeypatch: pytest.MonkeyPatch, error: type[Exception], read: str
) -> None:
    """Fails closed, whichever read fails, with a Retry-After."""
    _, token = customer(scene)

    def fail(*_: object) -> None:
        raise error("gone")

    monkeypatch.setattr(f"keyvault.services.verification.judging.{read}", fail)
    judgement = scene.judge(endpoint=ME, bearer=token)
    assert isinstance(judgement.verdict, Denial)
    assert judgement.verdict.code is ErrorCode.VERIFIER_STALE
    assert judgement.verdict.retry_after_seconds == 1
    assert (judgement.holder, judgement.record, judgement.customer) == (None, None, None)


@pytest.mark.database
def test_database_lost_still_denies_what_needs_no_read(scene: JudgingScene, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(key_id: str) -> None:
        raise OperationalError("gone")

    monkeypatch.setattr("keyvault.services.verification.judging.find_key_record", fail)
    assert verdict_code(scene.judge(key=None)) == "credential_missing"
    assert verdict_code(scene.judge(key="x")) == "credential_invalid"
    assert verdict_code(scene.judge(environment=PRODUCTION)) == "environment_mismatch"
    assert verdict_code(scene.judge(url=f"/x?{mint()}")) == "credential_in_url"


# --- customers --------------------------------------------------------------------------------------------


def customer(scene: JudgingScene, merchant_id: str = "acme") -> tuple[str, str]:
    """Issue a customer token; return its id and string."""
    key = scene.key if merchant_id == "acme" else issue(account(merchant_id))[0]
    allowed = grant(_holder(key, merchant_id), P.CUSTOMER_TOKENS_WRITE, account(merchant_id))
    row, text = issue_customer_token(allowed, account(merchant_id), key, customer_id="cust-1", ttl_seconds=60)
    return row.token_id, text.reveal()


def _holder(key: Key, merchant_id: str) -> KeyHolder:
    return KeyHolder(key.key_id, key.credential_id, KeyKind.PRIVATE, SANDBOX, merchant_id)


def test_customer_token_valid_names_the_customer_until_revoked(scene: JudgingScene) -> None:
    token_id, token = customer(scene)
    judgement = scene.judge(endpoint=ME, bearer=token)
    assert verdict_code(judgement) == "allowed"
    assert judgement.customer is not None
    assert (judgement.customer.customer_id, judgement.customer.token_id) == ("cust-1", token_id)
    revoke_customer_token(grant(_holder(scene.key, "acme"), P.CUSTOMER_TOKENS_WRITE, account()), account(), token_id)
    judgement = scene.judge(endpoint=ME, bearer=token)
    assert verdict_code(judgement) == "customer_token_revoked"
    assert judgement.customer is None


@pytest.mark.parametrize("kind", ["not accepted", "no endpoint", "no Bearer"])
def test_customer_token_that_is_not_needed_is_not_read(
    scene: JudgingScene, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    _, token = customer(scene)

    def fail(token_id: str) -> None:
        raise AssertionError("the token was read")

    monkeypatch.setattr("keyvault.services.verification.judging.find_customer_record", fail)
    cases: dict[str, dict[str, Any]] = {
        "not accepted": {"endpoint": CREATE, "bearer": token},
        "no endpoint": {"endpoint": NoMatchingEndpoint(), "bearer": token},
        "no Bearer": {"endpoint": RETRIEVE},
    }
    assert verdict_code(scene.judge(**cases[kind])) in {"bearer_not_supported", "endpoint_unknown", "allowed"}


# --- exposures and recorded uses --------------------------------------------------------------------------


@dataclass
class RecordedUses(UsageLog):
    def recorded(self) -> list[tuple[str, UseOutcome]]:
        return [(use.key_id, UseOutcome(use.outcome)) for use in self._counts]


def note(judgement: Judgement, *, is_probe: bool = False) -> list[tuple[str, UseOutcome]]:
    log = RecordedUses()
    note_use(judgement, log, source=ADDRESS, user_agent="shop/1", endpoint="orders.create", is_probe=is_probe)
    return log.recorded()


def test_exposure_in_a_url_is_attributed_only_with_proof(scene: JudgingScene) -> None:
    """A caller who writes another key's public id into a URL casts no suspicion on it; the response is the same."""
    proved = scene.judge(url=f"/orders?key={scene.text}")
    assert (verdict_code(proved), proved.exposed_key_id, proved.holder) == ("credential_in_url", scene.key.key_id, None)
    assert note(proved) == [(scene.key.key_id, UseOutcome.EXPOSED_IN_URL)]
    for text in (forged(scene.text), mint(seed="unknown"), scene.text[:-1], mint(scope=StringScope.PRODUCTION)):
        unproved = scene.judge(url=f"/orders?key={text}")
        assert unproved.exposed_key_id is None
        assert unproved.verdict == proved.verdict
        assert note(unproved) == []


def test_exposure_outside_the_scope_is_not_attributed(scene: JudgingScene) -> None:
    judgement = scene.judge(url=f"/orders?key={scene.text}", scope=frozenset({"globex"}))
    assert judgement.exposed_key_id is None


def test_exposure_of_a_key_of_the_other_environment_is_not_read(
    scene: JudgingScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process pinned to one environment lacks the other's peppers."""
    _, text = issue(account(environment=PRODUCTION))

    def fail(key_id: str) -> None:
        raise AssertionError("the key was read")

    monkeypatch.setattr("keyvault.services.verification.judging.find_key_record", fail)
    assert scene.judge(url=f"/orders?key={text.reveal()}").exposed_key_id is None


def test_exposure_of_a_public_key_in_a_url_is_attributed(scene: JudgingScene) -> None:
    key, text = issue(scene.account, kind=KeyKind.PUBLIC)
    assert scene.judge(url=f"/orders?key={text.reveal()}").exposed_key_id == key.key_id


def test_exposure_of_a_private_key_in_a_browser_is_recorded(scene: JudgingScene) -> None:
    refused = scene.judge(origin="https://shop.example")
    assert verdict_code(refused) == "private_key_in_browser"
    assert note(refused) == [(scene.key.key_id, UseOutcome.EXPOSED_IN_BROWSER), (scene.key.key_id, UseOutcome.DENIED)]


def test_exposure_with_an_origin_to_report_is_allowed_and_recorded(scene: JudgingScene) -> None:
    credential = scene.key.credential
    restrict_credential(admin_grant(P.CREDENTIALS_RESTRICT, scene.account), credential, [], OriginHeader.REPORT)
    reported = scene.judge(origin="https://shop.example")
    assert verdict_code(reported) == "allowed"
    assert note(reported) == [(scene.key.key_id, UseOutcome.EXPOSED_IN_BROWSER), (scene.key.key_id, UseOutcome.ALLOWED)]
    assert note(scene.judge()) == [(scene.key.key_id, UseOutcome.ALLOWED)]


def test_exposure_is_not_recorded_for_a_public_key_in_a_browser(scene: JudgingScene) -> None:
    key, text = issue(scene.account, kind=KeyKind.PUBLIC)
    endpoint = BUILT_IN.find("client.configuration")
    judgement = scene.judge(key=text.reveal(), endpoint=endpoint, origin="https://shop.example")
    assert note(judgement) == [(key.key_id, UseOutcome.ALLOWED)]


@pytest.mark.parametrize("denied", [*DENIED, "rate_limited"])
def test_denied_request_with_proof_is_recorded_as_denied(scene: JudgingScene, denied: str) -> None:
    """A denied holder still has the key, so a rotation must not count it as silent.

    Without proof nothing is recorded.
    """
    if denied == "rate_limited":
        for _ in range(10):
            scene.judge()
    recorded = note(scene.judge(**DENIED.get(denied, {})))
    expected = [] if denied in UNPROVED else [UseOutcome.DENIED]
    if denied == "private_key_in_browser":
        expected = [UseOutcome.EXPOSED_IN_BROWSER, UseOutcome.DENIED]
    assert recorded == [(scene.key.key_id, outcome) for outcome in expected]


def test_denied_request_of_a_revoked_key_is_not_recorded(scene: JudgingScene) -> None:
    """The key itself is the reason, and no rotation waits for its silence."""
    revoke_key(admin_grant(P.KEYS_REVOKE, scene.account), scene.key, RevocationReason.SUPERSEDED)
    judgement = scene.judge()
    assert verdict_code(judgement) == "key_revoked"
    assert note(judgement) == []


def test_attempt_on_a_suspended_key_is_recorded_only_with_proof(scene: JudgingScene) -> None:
    suspend_key(admin_grant(P.KEYS_SUSPEND, scene.account), scene.key)
    assert note(scene.judge()) == [(scene.key.key_id, UseOutcome.REFUSED)]
    assert note(scene.judge(key=forged(scene.text))) == []


@pytest.mark.parametrize("kind", ["allowed", "denied", "suspended", "in a URL", "in a browser"])
def test_probe_is_recorded_as_a_probe_only(scene: JudgingScene, kind: str) -> None:
    """A probe is no use, no attempt in quarantine and no exposure, whatever its verdict."""
    if kind == "suspended":
        suspend_key(admin_grant(P.KEYS_SUSPEND, scene.account), scene.key)
    requests: dict[str, dict[str, Any]] = {
        "denied": {"endpoint": NoMatchingEndpoint()},
        "in a URL": {"url": f"/orders?key={scene.text}"},
        "in a browser": {"origin": "https://shop.example"},
    }
    assert note(scene.judge(**requests.get(kind, {})), is_probe=True) == [(scene.key.key_id, UseOutcome.PROBED)]
    assert note(scene.judge(key=forged(scene.text)), is_probe=True) == [], "a probe without proof must not be recorded"


def test_probe_of_a_suspended_key_logs_no_warning(scene: JudgingScene, caplog: pytest.LogCaptureFixture) -> None:
    suspend_key(admin_grant(P.KEYS_SUSPEND, scene.account), scene.key)
    judgement = scene.judge()
    note(judgement, is_probe=True)
    assert "a suspended key was presented" not in caplog.messages
    note(judgement)
    assert "a suspended key was presented" in caplog.messages


def test_probe_with_a_customer_token_does_not_acknowledge_it(scene: JudgingScene) -> None:
    """The stored response with the token is kept until the merchant itself has used the token."""
    token_id, token = customer(scene)
    judgement = scene.judge(endpoint=ME, bearer=token)
    log = RecordedUses()
    note_use(judgement, log, source=ADDRESS, user_agent="shop/1", endpoint="customers.me", is_probe=True)
    assert log._secrets_used == set()
    note_use(judgement, log, source=ADDRESS, user_agent="shop/1", endpoint="customers.me")
    assert log._secrets_used == {token_id}


def test_origin_is_recorded_for_public_keys_only(scene: JudgingScene) -> None:
    """The origin shows which shops hold a public key; for a private key it only indicates an exposure."""
    origin, log = "https://shop.example", RecordedUses()
    _, text = issue(scene.account, kind=KeyKind.PUBLIC)
    public = scene.judge(key=text.reveal(), endpoint=BUILT_IN.find("client.configuration"), origin=origin)
    for judgement in (public, scene.judge(origin=origin)):
        note_use(judgement, log, source=ADDRESS, user_agent="shop/1", endpoint="", origin=origin)
    assert [(use.outcome, use.origin) for use in log._counts] == [
        (UseOutcome.ALLOWED, origin),
        (UseOutcome.EXPOSED_IN_BROWSER, ""),
        (UseOutcome.DENIED, ""),
    ]


# --- explanations -----------------------------------------------------------------------------------------


def test_explanation_spends_nothing_and_is_none_for_an_unknown_key(scene: JudgingScene) -> None:
    for _ in range(12):
        explained = explain_described(scene.request, scene.key.key_id, None, scene.at)
        assert explained is not None
        assert verdict_code(explained) == "allowed"
    assert scene.remaining() == 10
    assert explain_described(scene.request, "A" * 16, None, scene.at) is None


def test_explanation_judges_a_customer_token_by_its_id(scene: JudgingScene) -> None:
    token_id, _ = customer(scene)
    request = replace(scene.request, endpoint=ME, bearer="present")
    for named, expected in (
        (token_id, "allowed"),
        ("A" * 16, "customer_token_invalid"),
        (None, "customer_token_invalid"),
    ):
        explained = explain_described(request, scene.key.key_id, named, scene.at)
        assert explained is not None
        assert verdict_code(explained) == expected
