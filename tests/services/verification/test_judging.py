"""The whole judgement against the database: what it spends, what it counts, what it tells, and to whom."""

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

pytestmark = [pytest.mark.database, pytest.mark.django_db]

HOUR = 3600

ADDRESS, ELSEWHERE = "192.0.2.9", "198.51.100.7"
RETRIEVE, CREATE = BUILT_IN.find("orders.retrieve"), BUILT_IN.find("orders.create")
ME, END = BUILT_IN.find("customers.me"), BUILT_IN.find("credentials.revoke_self")
TEN = Limit(10, HOUR)


@dataclass(frozen=True)
class Scene:
    """`acme` with a private key, and a limit of ten an hour; `at` is the moment of every judgement."""

    account: Account
    key: Key
    text: str
    at: datetime

    @property
    def request(self) -> VerificationRequest:
        """One that is allowed."""
        return VerificationRequest(key=self.text, environment=SANDBOX, endpoint=CREATE, client_address=ADDRESS)

    def judge(self, **changes: Any) -> Judgement:
        return judge_presented(replace(self.request, **changes), self.at)

    def remaining(self) -> int:
        """What is left of the account's ten after one more request, plus that one."""
        spend = self.judge().spend
        assert spend is not None
        return spend.statuses[0].remaining + 1


@pytest.fixture(autouse=True)
def stopped_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """No limit gives anything back while a test runs, however slow it is."""
    accounts = limiter.Limiter(LocalStore(lambda: 0), None, 100)
    proofs = limiter.FailedProofs(limiter.Limiter(LocalStore(lambda: 0), None, 100), lambda: 0.0)
    monkeypatch.setattr("keyvault.services.verification.judging.limiter", lambda: accounts)
    monkeypatch.setattr("keyvault.services.verification.judging.failed_proofs", lambda: proofs)


@pytest.fixture
def scene(db: None) -> Scene:
    make_merchant("acme")
    key, text = issue(account())
    set_account_limit(may(P.LIMITS_WRITE, account()), account(), TEN)
    return Scene(account(), key, text.reveal(), now())


def may(permission: P, of: Account | None = None) -> Grant:
    return grant(the_operator("admin", Role.KEY_ADMINISTRATOR), permission, of)


def code(judgement: Judgement) -> str:
    return judgement.verdict.code.value if isinstance(judgement.verdict, Denial) else "allowed"


def forged(text: str) -> str:
    """The same id, another secret, the right checksum."""
    head = text[:27] + mint(seed="another")[27:70]
    return head + checksum(head)


def replacement(key: Key) -> str:
    """A second key of the credential, as a rotation makes one."""
    allowed = grant(WORKER, P.ROTATIONS_ADVANCE, key.credential.account)
    staged, text = stage_key(allowed, key.credential, expires_in_days=None)
    activate_key(allowed, staged)
    return text.reveal()


def added(**rule: Any) -> Endpoint:
    draft = EndpointDraft("refunds.create", "POST", "/refunds", frozenset({KeyKind.PRIVATE}), **rule)
    add_endpoint(may(P.CATALOG_WRITE), draft)
    found = find_endpoint("refunds.create")
    assert isinstance(found, Endpoint)
    return found


# --- what is spent ----------------------------------------------------------------------------------------


def test_allowed_request_spends_one_and_the_eleventh_of_ten_is_refused(scene: Scene) -> None:
    assert [code(scene.judge()) for _ in range(10)] == ["allowed"] * 10
    judgement = scene.judge()
    assert code(judgement) == "rate_limited"
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
def test_denied_request_spends_nothing(scene: Scene, denied: str) -> None:
    """Only what is let through counts: a client that is misconfigured does not use its limit up."""
    for _ in range(3):
        assert code(scene.judge(**DENIED[denied])) == denied
    assert scene.remaining() == 10


def test_refused_by_the_limit_spends_from_neither_bucket(scene: Scene) -> None:
    """All or nothing: a request that its endpoint's limit refuses takes nothing from the account's."""
    set_endpoint_limit(may(P.LIMITS_WRITE, scene.account), SANDBOX, "orders.create", Limit(1, HOUR), scene.account)
    assert [code(scene.judge()) for _ in range(4)] == ["allowed", "rate_limited", "rate_limited", "rate_limited"]
    spend = scene.judge(endpoint=RETRIEVE).spend
    assert spend is not None
    assert [(each.policy, each.remaining) for each in spend.statuses] == [("account", 8)]


@pytest.mark.parametrize("text", [None, "", "nonsense", mint(seed="nobody's"), mint()[:-6] + "000000"])
def test_unproved_request_spends_nothing(scene: Scene, text: str | None) -> None:
    assert scene.judge(key=text).spend is None
    assert scene.remaining() == 10


def test_wrong_secret_never_spends_the_victim_s_limit(scene: Scene) -> None:
    """Whoever knows a key's public id cannot use its owner's limit up."""
    for _ in range(12):
        assert code(scene.judge(key=forged(scene.text))) == "credential_invalid"
    assert scene.remaining() == 10


def test_dry_run_spends_nothing_and_is_no_failed_attempt(scene: Scene) -> None:
    for _ in range(12):
        assert code(scene.judge(is_dry=True)) == "allowed"
    assert scene.judge(is_dry=True).spend is None
    assert scene.remaining() == 10
    for _ in range(FAILED_PROOF_LIMIT.count + 1):
        judgement = scene.judge(key="x", is_dry=True)
    assert isinstance(judgement.verdict, Denial)
    assert judgement.verdict.retry_after_seconds is None


def test_both_keys_of_a_rotation_draw_from_one_bucket(scene: Scene) -> None:
    """A rotation does not double anybody's limit, and its end does not halve it."""
    other = replacement(scene.key)
    for _ in range(5):
        assert code(scene.judge()) == "allowed"
        assert code(scene.judge(key=other)) == "allowed"
    assert code(scene.judge()) == code(scene.judge(key=other)) == "rate_limited"


def test_shoppers_cannot_use_up_what_the_backend_needs(scene: Scene) -> None:
    _, public = issue(scene.account, kind=KeyKind.PUBLIC)
    shop = {"key": public.reveal(), "endpoint": BUILT_IN.find("client.configuration")}
    assert [code(scene.judge(**shop)) for _ in range(11)] == ["allowed"] * 10 + ["rate_limited"]
    assert scene.remaining() == 10


def test_used_up_limit_never_keeps_a_leaked_key_alive(scene: Scene) -> None:
    """`credentials.revoke_self` passes: whoever found the key cannot spend its owner's way out."""
    for _ in range(10):
        scene.judge()
    assert code(scene.judge()) == "rate_limited"
    judgement = scene.judge(endpoint=END)
    assert code(judgement) == "allowed"
    assert judgement.spend is None


def test_cost_is_spent_at_once_or_not_at_all(scene: Scene) -> None:
    assert code(scene.judge(cost=8)) == "allowed"
    assert code(scene.judge(cost=3)) == "rate_limited"
    assert code(scene.judge(cost=2)) == "allowed"


@pytest.mark.parametrize("is_dry", [False, True])
def test_cost_above_the_burst_is_request_invalid_and_names_the_burst(scene: Scene, is_dry: bool) -> None:
    """Waiting would not help, so that nobody is told to; and a dry run says no as well."""
    verdict = scene.judge(cost=11, is_dry=is_dry).verdict
    assert isinstance(verdict, Denial)
    assert verdict.code is ErrorCode.REQUEST_INVALID
    assert "10" in verdict.detail
    assert verdict.retry_after_seconds is None
    assert scene.remaining() == 10


# --- a limit that is changed ------------------------------------------------------------------------------


def test_limit_changed_starts_full_also_when_it_is_changed_back(scene: Scene) -> None:
    """And another account's used-up limit of the same numbers is nobody else's."""
    tight = Limit(1, HOUR)
    for _ in range(2):
        set_endpoint_limit(may(P.LIMITS_WRITE, scene.account), SANDBOX, "orders.create", tight, scene.account)
        assert isinstance(scene.judge().verdict, Grant)
        assert isinstance(scene.judge().verdict, Denial)
        set_endpoint_limit(may(P.LIMITS_WRITE, scene.account), SANDBOX, "orders.create", None, scene.account)
    set_endpoint_limit(may(P.LIMITS_WRITE, None), SANDBOX, "orders.create", tight)
    assert isinstance(scene.judge().verdict, Grant)


# --- which limit ------------------------------------------------------------------------------------------


def test_limit_of_the_pair_goes_before_the_endpoint_s_before_the_catalog_s(scene: Scene) -> None:
    endpoint = added(limit_count=5, limit_seconds=HOUR)
    make_merchant("globex")

    def in_force() -> int | None:
        spend = scene.judge(endpoint=endpoint).spend
        assert spend is not None
        return {each.policy: each.limit.count for each in spend.statuses}.get("endpoint")

    def put(count: int | None, of: Account | None, environment: Environment = SANDBOX) -> None:
        limit = None if count is None else Limit(count, HOUR)
        set_endpoint_limit(may(P.LIMITS_WRITE, of), environment, endpoint.name, limit, of)

    assert in_force() == 5
    put(9, account("globex"))
    put(8, None, PRODUCTION)
    assert in_force() == 5
    put(7, None)
    assert in_force() == 7
    put(6, scene.account)
    assert in_force() == 6
    put(None, None)
    assert in_force() == 6
    put(None, scene.account)
    assert in_force() == 5


def test_endpoint_without_a_limit_has_the_account_s_alone(scene: Scene) -> None:
    spend = scene.judge().spend
    assert spend is not None
    assert [(each.policy, each.limit) for each in spend.statuses] == [("account", TEN)]


def test_account_without_a_limit_has_the_default_of_its_environment(scene: Scene) -> None:
    set_account_limit(may(P.LIMITS_WRITE, scene.account), account(), None)
    spend = scene.judge().spend
    assert spend is not None
    assert spend.statuses[0].limit == Limit(25, 1)
    _, text = issue(account(environment=PRODUCTION))
    spend = scene.judge(key=text.reveal(), environment=PRODUCTION).spend
    assert spend is not None
    assert spend.statuses[0].limit == Limit(100, 1)


def test_changed_limit_starts_full(scene: Scene) -> None:
    for _ in range(10):
        scene.judge()
    set_account_limit(may(P.LIMITS_WRITE, account()), account(), Limit(11, HOUR))
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
def test_lost_limiter_lets_a_share_pass_or_nobody_as_the_endpoint_says(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, on_loss: LimiterFailurePolicy, expected: str
) -> None:
    """Never unlimited: half of ten here, or none; and never in the way of ending a leaked key."""
    endpoint = added(on_limiter_loss=on_loss)
    lost = limiter.Limiter(LostStore(), LocalStore(lambda: 0), fallback_percent=50)
    monkeypatch.setattr("keyvault.services.verification.judging.limiter", lambda: lost)
    codes = [code(scene.judge(endpoint=endpoint)) for _ in range(6)]
    assert codes == [expected] * 5 + ["rate_limited" if expected == "allowed" else expected]
    verdict = scene.judge(endpoint=endpoint).verdict
    assert isinstance(verdict, Denial)
    assert verdict.holder is not None
    assert verdict.retry_after_seconds is not None
    assert verdict.retry_after_seconds >= 1
    assert code(scene.judge(endpoint=END)) == "allowed"


# --- failed proofs ----------------------------------------------------------------------------------------


def failures(text: str) -> dict[str, str]:
    return {
        "malformed": "nonsense",
        "wrong checksum": text[:-6] + "000000",
        "service token": mint(StringKind.SERVICE_TOKEN, StringScope.ALL),
        "unknown": mint(seed="nobody's"),
        "wrong secret": forged(text),
    }


def retry_after(judgement: Judgement) -> int | None:
    assert isinstance(judgement.verdict, Denial)
    assert judgement.verdict.code is ErrorCode.CREDENTIAL_INVALID
    return judgement.verdict.retry_after_seconds


def test_failed_proofs_count_alike_and_the_one_after_the_hundredth_is_told_to_wait(scene: Scene) -> None:
    """Guessing is slowed by address, whatever is guessed, and a valid key from there passes all the same."""
    texts = list(failures(scene.text).values())
    for number in range(FAILED_PROOF_LIMIT.count):
        assert retry_after(scene.judge(key=texts[number % len(texts)])) is None
    for text in texts:
        seconds = retry_after(scene.judge(key=text))
        assert seconds is not None
        assert 1 <= seconds <= FAILED_PROOF_LIMIT.seconds
    assert code(scene.judge()) == "allowed"
    assert retry_after(scene.judge(key="x", client_address=ELSEWHERE)) is None
    assert retry_after(scene.judge(key="x", client_address=None)) is None


@pytest.mark.parametrize("how", ["malformed", "wrong checksum", "service token", "unknown", "wrong secret"])
def test_failed_proofs_of_each_sort_use_the_address_up(scene: Scene, how: str) -> None:
    """No sort of guess is free: else nobody would guess in another way."""
    text = failures(scene.text)[how]
    for _ in range(FAILED_PROOF_LIMIT.count):
        assert retry_after(scene.judge(key=text)) is None
    assert retry_after(scene.judge(key=text)) is not None


def test_what_is_no_failed_proof_does_not_count(scene: Scene) -> None:
    """Missing credentials, another environment's key, a proved key that was suspended."""
    suspend_key(may(P.KEYS_SUSPEND, scene.account), scene.key)
    for _ in range(FAILED_PROOF_LIMIT.count):
        assert code(scene.judge(key=None)) == "credential_missing"
        assert code(scene.judge(environment=PRODUCTION)) == "environment_mismatch"
        assert code(scene.judge()) == "key_not_active"
    assert retry_after(scene.judge(key="x")) is None


def test_over_its_limit_an_address_learns_no_more_than_before(scene: Scene) -> None:
    """The same 401 with Retry-After, for what is malformed, unknown and wrong."""
    for _ in range(FAILED_PROOF_LIMIT.count):
        scene.judge(key="x")
    verdicts = [scene.judge(key=text).verdict for text in failures(scene.text).values()]
    told = {(each.code, each.detail, each.internal, each.holder) for each in verdicts if isinstance(each, Denial)}
    assert len(verdicts) == len(failures(scene.text))
    assert told == {(ErrorCode.CREDENTIAL_INVALID, "The API key is not valid.", "", None)}


# --- scope ------------------------------------------------------------------------------------------------


def test_key_outside_the_scope_proves_nothing_and_spends_nothing(scene: Scene) -> None:
    """To a token of another merchant the key is as unknown as any: same verdict, no name, no spent limit."""
    foreign = scene.judge(scope=frozenset({"globex"}))
    unknown = scene.judge(key=mint(seed="nobody's"), scope=frozenset({"globex"}))
    assert foreign == unknown
    assert (foreign.holder, foreign.record, foreign.spend) == (None, None, None)
    assert foreign.trace == [Check(ErrorCode.CREDENTIAL_INVALID, False)]
    assert scene.remaining() == 10
    assert code(scene.judge(scope=frozenset({"acme", "globex"}))) == "allowed"
    assert code(scene.judge(scope=frozenset())) == "credential_invalid"


def test_foreign_key_counts_as_a_failed_proof(scene: Scene) -> None:
    """Else the limiter of failed proofs would tell a foreign key from an unknown one."""
    for _ in range(FAILED_PROOF_LIMIT.count):
        scene.judge(scope=frozenset({"globex"}))
    assert retry_after(scene.judge(scope=frozenset({"globex"}))) is not None


def test_suspended_key_outside_the_scope_does_not_tell_its_state(scene: Scene) -> None:
    suspend_key(may(P.KEYS_SUSPEND, scene.account), scene.key)
    assert code(scene.judge()) == "key_not_active"
    assert scene.judge(scope=frozenset({"globex"})) == scene.judge(
        key=mint(seed="nobody's"), scope=frozenset({"globex"})
    )


# --- a database that does not answer ----------------------------------------------------------------------


@pytest.mark.parametrize("error", [OperationalError, InterfaceError])
@pytest.mark.parametrize("read", ["find_key_record", "find_customer_record", "endpoint_limit"])
def test_lost_database_is_verifier_stale_and_never_a_yes(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, error: type[Exception], read: str
) -> None:
    """Whatever of it cannot be read, nobody is vouched for, and the client is told when to come back."""
    _, token = customer(scene)

    def fail(*_: object) -> None:
        raise error("gone")

    monkeypatch.setattr(f"keyvault.services.verification.judging.{read}", fail)
    judgement = scene.judge(endpoint=ME, bearer=token)
    assert isinstance(judgement.verdict, Denial)
    assert judgement.verdict.code is ErrorCode.VERIFIER_STALE
    assert judgement.verdict.retry_after_seconds == 1
    assert (judgement.holder, judgement.record, judgement.customer) == (None, None, None)


def test_lost_database_still_answers_what_needs_none(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(key_id: str) -> None:
        raise OperationalError("gone")

    monkeypatch.setattr("keyvault.services.verification.judging.find_key_record", fail)
    assert code(scene.judge(key=None)) == "credential_missing"
    assert code(scene.judge(key="x")) == "credential_invalid"
    assert code(scene.judge(environment=PRODUCTION)) == "environment_mismatch"
    assert code(scene.judge(url=f"/x?{mint()}")) == "credential_in_url"


# --- customers --------------------------------------------------------------------------------------------


def customer(scene: Scene, merchant_id: str = "acme") -> tuple[str, str]:
    """A token's id, and the token."""
    key = scene.key if merchant_id == "acme" else issue(account(merchant_id))[0]
    allowed = grant(_holder(key, merchant_id), P.CUSTOMER_TOKENS_WRITE, account(merchant_id))
    row, text = issue_customer_token(allowed, account(merchant_id), key, customer_id="cust-1", ttl_seconds=60)
    return row.token_id, text.reveal()


def _holder(key: Key, merchant_id: str) -> KeyHolder:
    return KeyHolder(key.key_id, key.credential_id, KeyKind.PRIVATE, SANDBOX, merchant_id)


def test_customer_is_known_until_the_token_is_revoked(scene: Scene) -> None:
    token_id, token = customer(scene)
    judgement = scene.judge(endpoint=ME, bearer=token)
    assert code(judgement) == "allowed"
    assert judgement.customer is not None
    assert (judgement.customer.customer_id, judgement.customer.token_id) == ("cust-1", token_id)
    revoke_customer_token(grant(_holder(scene.key, "acme"), P.CUSTOMER_TOKENS_WRITE, account()), account(), token_id)
    judgement = scene.judge(endpoint=ME, bearer=token)
    assert code(judgement) == "customer_token_revoked"
    assert judgement.customer is None


@pytest.mark.parametrize("sort", ["none taken", "no endpoint", "no Bearer"])
def test_customer_token_that_is_not_asked_for_is_never_looked_up(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, sort: str
) -> None:
    _, token = customer(scene)

    def fail(token_id: str) -> None:
        raise AssertionError("it was looked up")

    monkeypatch.setattr("keyvault.services.verification.judging.find_customer_record", fail)
    cases: dict[str, dict[str, Any]] = {
        "none taken": {"endpoint": CREATE, "bearer": token},
        "no endpoint": {"endpoint": NoMatchingEndpoint(), "bearer": token},
        "no Bearer": {"endpoint": RETRIEVE},
    }
    assert code(scene.judge(**cases[sort])) in {"bearer_not_supported", "endpoint_unknown", "allowed"}


# --- exposures, and what is noted -------------------------------------------------------------------------


@dataclass
class Noted(UsageLog):
    def noted(self) -> list[tuple[str, UseOutcome]]:
        return [(use.key_id, UseOutcome(use.outcome)) for use in self._counts]


def note(judgement: Judgement, *, is_probe: bool = False) -> list[tuple[str, UseOutcome]]:
    log = Noted()
    note_use(judgement, log, source=ADDRESS, user_agent="shop/1", endpoint="orders.create", is_probe=is_probe)
    return log.noted()


def test_exposed_key_in_a_url_is_attributed_after_proof_only(scene: Scene) -> None:
    """Whoever writes a key's public id into a URL brings no suspicion upon it; the answer is the same."""
    proved = scene.judge(url=f"/orders?key={scene.text}")
    assert (code(proved), proved.exposed_key_id, proved.holder) == ("credential_in_url", scene.key.key_id, None)
    assert note(proved) == [(scene.key.key_id, UseOutcome.EXPOSED_IN_URL)]
    for text in (forged(scene.text), mint(seed="nobody's"), scene.text[:-1], mint(scope=StringScope.PRODUCTION)):
        unproved = scene.judge(url=f"/orders?key={text}")
        assert unproved.exposed_key_id is None
        assert unproved.verdict == proved.verdict
        assert note(unproved) == []


def test_exposed_key_outside_the_scope_is_attributed_to_nobody(scene: Scene) -> None:
    judgement = scene.judge(url=f"/orders?key={scene.text}", scope=frozenset({"globex"}))
    assert judgement.exposed_key_id is None


def test_exposed_key_of_the_other_environment_is_not_looked_up(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is pinned to one environment has not the other's peppers."""
    _, text = issue(account(environment=PRODUCTION))

    def fail(key_id: str) -> None:
        raise AssertionError("it was looked up")

    monkeypatch.setattr("keyvault.services.verification.judging.find_key_record", fail)
    assert scene.judge(url=f"/orders?key={text.reveal()}").exposed_key_id is None


def test_exposed_public_key_in_a_url_is_attributed_too(scene: Scene) -> None:
    key, text = issue(scene.account, kind=KeyKind.PUBLIC)
    assert scene.judge(url=f"/orders?key={text.reveal()}").exposed_key_id == key.key_id


def test_private_key_from_a_browser_is_noted_as_exposed(scene: Scene) -> None:
    refused = scene.judge(origin="https://shop.example")
    assert code(refused) == "private_key_in_browser"
    assert note(refused) == [(scene.key.key_id, UseOutcome.EXPOSED_IN_BROWSER), (scene.key.key_id, UseOutcome.DENIED)]


def test_private_key_whose_credential_reports_origins_is_allowed_and_noted(scene: Scene) -> None:
    credential = scene.key.credential
    restrict_credential(may(P.CREDENTIALS_RESTRICT, scene.account), credential, [], OriginHeader.REPORT)
    reported = scene.judge(origin="https://shop.example")
    assert code(reported) == "allowed"
    assert note(reported) == [(scene.key.key_id, UseOutcome.EXPOSED_IN_BROWSER), (scene.key.key_id, UseOutcome.ALLOWED)]
    assert note(scene.judge()) == [(scene.key.key_id, UseOutcome.ALLOWED)]


def test_public_key_from_a_browser_is_where_it_belongs(scene: Scene) -> None:
    key, text = issue(scene.account, kind=KeyKind.PUBLIC)
    shop = BUILT_IN.find("client.configuration")
    judgement = scene.judge(key=text.reveal(), endpoint=shop, origin="https://shop.example")
    assert note(judgement) == [(key.key_id, UseOutcome.ALLOWED)]


@pytest.mark.parametrize("denied", [*DENIED, "rate_limited"])
def test_denied_request_of_a_good_key_is_noted_as_denied(scene: Scene, denied: str) -> None:
    """It proves nothing, but whoever is refused with a key holds it still: a rotation must not take it for silent.

    Where possession was not proved, nothing is noted at all.
    """
    if denied == "rate_limited":
        for _ in range(10):
            scene.judge()
    noted = note(scene.judge(**DENIED.get(denied, {})))
    expected = [] if denied in UNPROVED else [UseOutcome.DENIED]
    if denied == "private_key_in_browser":
        expected = [UseOutcome.EXPOSED_IN_BROWSER, UseOutcome.DENIED]
    assert noted == [(scene.key.key_id, outcome) for outcome in expected]


def test_denied_request_of_a_key_that_ended_is_not_noted(scene: Scene) -> None:
    """There the key is the reason: nobody waits for its silence any more."""
    revoke_key(may(P.KEYS_REVOKE, scene.account), scene.key, RevocationReason.SUPERSEDED)
    judgement = scene.judge()
    assert code(judgement) == "key_revoked"
    assert note(judgement) == []


def test_try_on_a_suspended_key_is_noted_after_proof_only(scene: Scene) -> None:
    suspend_key(may(P.KEYS_SUSPEND, scene.account), scene.key)
    assert note(scene.judge()) == [(scene.key.key_id, UseOutcome.REFUSED)]
    assert note(scene.judge(key=forged(scene.text))) == []


@pytest.mark.parametrize("sort", ["allowed", "denied", "suspended", "in a URL", "in a browser"])
def test_probe_is_noted_as_a_probe_and_as_nothing_else(scene: Scene, sort: str) -> None:
    """A test call of our own is no use, no try in quarantine and no exposure, whatever its verdict."""
    if sort == "suspended":
        suspend_key(may(P.KEYS_SUSPEND, scene.account), scene.key)
    asked: dict[str, dict[str, Any]] = {
        "denied": {"endpoint": NoMatchingEndpoint()},
        "in a URL": {"url": f"/orders?key={scene.text}"},
        "in a browser": {"origin": "https://shop.example"},
    }
    assert note(scene.judge(**asked.get(sort, {})), is_probe=True) == [(scene.key.key_id, UseOutcome.PROBED)]
    assert note(scene.judge(key=forged(scene.text)), is_probe=True) == [], "nor is it noted without proof"


def test_probe_of_a_suspended_key_alerts_nobody(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    suspend_key(may(P.KEYS_SUSPEND, scene.account), scene.key)
    judgement = scene.judge()
    note(judgement, is_probe=True)
    assert "a suspended key was presented" not in caplog.messages
    note(judgement)
    assert "a suspended key was presented" in caplog.messages


def test_probe_with_a_customer_token_does_not_say_that_its_holder_has_it(scene: Scene) -> None:
    """The answer that showed the token stays until the merchant itself has used it."""
    token_id, token = customer(scene)
    judgement = scene.judge(endpoint=ME, bearer=token)
    log = Noted()
    note_use(judgement, log, source=ADDRESS, user_agent="shop/1", endpoint="customers.me", is_probe=True)
    assert log._secrets_used == set()
    note_use(judgement, log, source=ADDRESS, user_agent="shop/1", endpoint="customers.me")
    assert log._secrets_used == {token_id}


def test_origin_is_noted_of_public_keys_only(scene: Scene) -> None:
    """It tells which shops hold a public key; of a private one it is a sign of exposure, and no more."""
    origin, log = "https://shop.example", Noted()
    _, text = issue(scene.account, kind=KeyKind.PUBLIC)
    public = scene.judge(key=text.reveal(), endpoint=BUILT_IN.find("client.configuration"), origin=origin)
    for judgement in (public, scene.judge(origin=origin)):
        note_use(judgement, log, source=ADDRESS, user_agent="shop/1", endpoint="", origin=origin)
    assert [(use.outcome, use.origin) for use in log._counts] == [
        (UseOutcome.ALLOWED, origin),
        (UseOutcome.EXPOSED_IN_BROWSER, ""),
        (UseOutcome.DENIED, ""),
    ]


# --- explaining -------------------------------------------------------------------------------------------


def test_explained_request_spends_nothing_and_of_an_unknown_key_is_none(scene: Scene) -> None:
    for _ in range(12):
        explained = explain_described(scene.request, scene.key.key_id, None, scene.at)
        assert explained is not None
        assert code(explained) == "allowed"
    assert scene.remaining() == 10
    assert explain_described(scene.request, "A" * 16, None, scene.at) is None


def test_explained_customer_token_is_judged_by_its_id(scene: Scene) -> None:
    token_id, _ = customer(scene)
    request = replace(scene.request, endpoint=ME, bearer="it was sent")
    for named, expected in (
        (token_id, "allowed"),
        ("A" * 16, "customer_token_invalid"),
        (None, "customer_token_invalid"),
    ):
        explained = explain_described(request, scene.key.key_id, named, scene.at)
        assert explained is not None
        assert code(explained) == expected
