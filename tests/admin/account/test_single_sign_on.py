"""Single sign-on to the console, with a real identity provider that a test makes lie."""

import html
import io
import json
import re
import ssl
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any
from urllib.parse import parse_qs, urlsplit

import jwt
import pytest
import requests
from allauth.socialaccount.internal.statekit import STATE_TTL, STATES_SESSION_KEY
from allauth.socialaccount.models import SocialAccount, SocialApp, SocialToken
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from django.conf import settings
from django.contrib.auth import SESSION_KEY
from django.test import Client, override_settings

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import HOST
from keyvault.access.roles import Role
from keyvault.access.scopes import EVERYWHERE
from keyvault.access.single_sign_on import IdentityProvider
from keyvault.domain.notifications import NoticeKind
from keyvault.domain.plaintext import Plaintext
from keyvault.models import AuditEntry, ConsoleSession, Notice, Operator
from keyvault.services.operators.operators import disable_operator, set_scope
from keyvault.services.recording.authorization import operator_principal
from keyvault.services.sessions.invitations import invite
from keyvault.services.sessions.refusals import sign_in_refusals
from keyvault.services.sessions.second_factors import (
    TOTP,
    NewFactor,
    add_second_factor,
    encrypt_seed,
    has_second_factor,
    new_totp_seed,
    totp_code,
)
from keyvault.services.sessions.single_sign_on import identity_provider_client
from keyvault.services.sessions.step_up import is_fresh
from keyvault.services.sessions.store import session_id
from tests.admin.desk import Desk, dump, text_of
from tests.factories import PASSWORD, grant
from tests.servers.identity_provider import (
    CLIENT_ID,
    CLIENT_SECRET,
    Claims,
    SigningKey,
    StubProvider,
    identity_provider,
)

BEGIN = "/admin/login/sso/"
CALLBACK = "/admin/login/sso/callback/"
LOGIN = "/admin/login/"
FIREFOX = "Mozilla/5.0 (X11; Linux x86_64; rv:128.0) Gecko/20100101 Firefox/128.0"
LAST = "Your last sign-in was on"
GROUP_ROLES = {"audit": frozenset({Role.AUDITOR}), "keys": frozenset({Role.KEY_ADMINISTRATOR})}


read_trust = cache(ssl.create_default_context)
"""Read the host's CAs once: each session reads them, which takes longer than the rest of a test, and none is used."""


@pytest.fixture
def provider(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> Iterator[StubProvider]:
    monkeypatch.setattr(ssl, "create_default_context", read_trust)
    with identity_provider() as stub:
        stub.person |= {"groups": ["audit"], "amr": ["pwd", "mfa"]}
        secret = Plaintext(CLIENT_SECRET)
        second_factors = frozenset({("amr", "mfa"), ("acr", "strong")})
        configured = IdentityProvider(stub.issuer, CLIENT_ID, secret, "groups", GROUP_ROLES, second_factors)
        identity_provider_client.cache_clear()
        with override_settings(IDENTITY_PROVIDER=configured):
            yield stub
        identity_provider_client.cache_clear()


@pytest.fixture(autouse=True)
def fresh_refusals() -> None:
    sign_in_refusals.forget()


def begin(client: Client, query: str = "", **form: str) -> str:
    """Press the button and return the URL of the provider that the browser opens."""
    answer = client.post(BEGIN + query, form)
    assert answer.status_code == 200, text_of(answer)
    found = re.search(r'http-equiv="refresh" content="0; url=([^"]+)"', text_of(answer))
    assert found is not None
    return html.unescape(found[1])


def agree(url: str) -> str:
    """Let the provider send the browser back; return path and query of that URL."""
    answer = requests.get(url, allow_redirects=False, timeout=10)
    back = urlsplit(answer.headers["Location"])
    return f"{back.path}?{back.query}"


def sign_in(client: Client, **form: str) -> Any:
    return client.get(agree(begin(client, **form)))


def is_signed_in(client: Client) -> bool:
    return SESSION_KEY in client.session


def entries(*events: str) -> list[dict[str, Any]]:
    rows = AuditEntry.objects.filter(event__in=events).order_by("pk")
    return [json.loads(bytes(row.body)) for row in rows]


def refusals() -> list[tuple[str, str]]:
    """Return operator and reason of each audited refusal."""
    sign_in_refusals.flush()
    return [(entry["details"]["operator"], entry["details"]["reason"]) for entry in entries("operator.sign_in_refused")]


def assert_refused(answer: Any, client: Client, reason: str, operator: str = "unknown", status: int = 403) -> None:
    assert answer.status_code == status, text_of(answer)
    assert not is_signed_in(client)
    assert refusals() == [(operator, reason)]


def jane() -> Operator:
    row: Operator = Operator.objects.get(username="jane")
    return row


# ---------------------------------------------------------------------------------------------- the right way


def test_single_sign_on_creates_the_operator_and_signs_it_in(provider: StubProvider) -> None:
    client = Client()
    answer = sign_in(client)
    assert (answer.status_code, answer["Location"]) == (302, "/admin/")
    assert client.session[SESSION_KEY] == str(jane().pk)
    assert jane().roles == {Role.AUDITOR}
    assert not jane().has_usable_password()
    link = SocialAccount.objects.get()
    assert (link.user_id, link.provider, link.uid) == (jane().pk, provider.issuer, provider.person["sub"])
    linked, created, signed_in = entries("operator.linked", "operator.created", "operator.signed_in")[-3:]
    assert [entry["actor"] for entry in (linked, created)] == ["system:single_sign_on"] * 2
    assert linked["details"] == {"username": "jane", "issuer": provider.issuer, "subject": provider.person["sub"]}
    assert (signed_in["actor"], signed_in["details"]["issuer"]) == ("operator:jane", provider.issuer)


def test_single_sign_on_stores_no_token_and_no_secret(provider: StubProvider) -> None:
    sent: list[str] = []

    def sign(claims: Claims) -> str:
        sent.append(provider.keys[0].sign(claims))
        return sent[0]

    provider.sign = sign
    client = Client()
    callback = agree(begin(client))
    client.get(callback)
    stored = dump() + str(dict(client.session))
    assert is_signed_in(client)
    assert not [
        secret for secret in (*sent, CLIENT_SECRET, parse_qs(urlsplit(callback).query)["code"][0]) if secret in stored
    ]
    assert not SocialToken.objects.exists()
    assert not SocialApp.objects.exists()


def test_single_sign_on_request_is_bound_to_the_browser(provider: StubProvider) -> None:
    """The state, the nonce and the PKCE challenge are new at each sign-in, and the callback is the public URL."""
    first, second = (parse_qs(urlsplit(begin(Client(), next="/admin/")).query) for _ in range(2))
    assert first["code_challenge_method"] == ["S256"]
    assert first["redirect_uri"] == [f"{settings.CONSOLE_ORIGIN}{CALLBACK}"]
    assert (first["response_type"], first["acr_values"], first["max_age"]) == (["code"], ["strong"], ["28800"])
    assert set(first["scope"][0].split()) == {"openid", "profile", "groups"}
    assert all(first[name] != second[name] for name in ("state", "nonce", "code_challenge"))


def test_single_sign_on_request_takes_no_parameter_of_the_browser(provider: StubProvider) -> None:
    """allauth's own view would let a link choose these."""
    link = "?scope=admin&auth_params=prompt%3Dnone&process=connect&action=reprompt&next=https://evil.example"
    asked = parse_qs(urlsplit(begin(Client(), link)).query)
    assert set(asked["scope"][0].split()) == {"openid", "profile", "groups"}
    assert "prompt" not in asked


def test_single_sign_on_finds_the_operator_by_issuer_and_subject_only(provider: StubProvider) -> None:
    """Neither a name nor an e-mail address identifies anybody: another person can get it."""
    sign_in(Client())
    provider.person |= {"preferred_username": "jane.doe", "email": "admin@example.com"}
    client = Client()
    sign_in(client)
    assert client.session[SESSION_KEY] == str(jane().pk)
    provider.person |= {"sub": "another", "preferred_username": "jane"}
    other = Client()
    assert_refused(sign_in(other), other, "name_taken")


def test_single_sign_on_of_another_issuer_is_another_person(provider: StubProvider) -> None:
    sign_in(Client())
    SocialAccount.objects.update(provider="https://id.example.com")
    client = Client()
    assert_refused(sign_in(client), client, "name_taken")


def test_single_sign_on_with_changed_groups_changes_roles_and_ends_other_sessions(provider: StubProvider) -> None:
    old, new = Client(), Client()
    sign_in(old)
    provider.person["groups"] = ["keys", "unknown"]
    sign_in(new)
    assert jane().roles == {Role.KEY_ADMINISTRATOR}
    assert entries("operator.roles_changed")[-1]["details"] == {
        "username": "jane",
        "old": ["auditor"],
        "new": ["key_administrator"],
        "sessions_ended": 1,
    }
    assert is_signed_in(new)
    old.get("/admin/")
    assert not is_signed_in(old)


def test_single_sign_on_with_unchanged_groups_keeps_other_sessions(provider: StubProvider) -> None:
    first, second = Client(), Client()
    sign_in(first)
    sign_in(second)
    first.get("/admin/")
    assert is_signed_in(first)
    assert len(entries("operator.roles_changed")) == 0


def test_single_sign_on_without_a_mapped_group_takes_the_roles(provider: StubProvider) -> None:
    """A person who left the groups has no role, in the console and on the command line."""
    old, new = Client(), Client()
    sign_in(old)
    provider.person["groups"] = ["unknown"]
    assert_refused(sign_in(new), new, "no_role", "jane")
    assert jane().roles == frozenset()
    old.get("/admin/")
    assert not is_signed_in(old)


def test_single_sign_on_takes_the_role_of_the_last_administrator(provider: StubProvider) -> None:
    """The provider decides. The host can create another administrator."""
    provider.person["groups"] = ["keys"]
    sign_in(Client())
    set_scope(grant(HOST, P.OPERATORS_WRITE), jane(), EVERYWHERE)
    disable_operator(grant(HOST, P.OPERATORS_WRITE), Operator.objects.get(username="admin"))
    provider.person["groups"] = []
    client = Client()
    assert_refused(sign_in(client), client, "no_role", "jane")
    assert jane().roles == frozenset()


@pytest.mark.parametrize(
    ("person", "reason"),
    [
        ({"groups": []}, "no_role"),
        ({"groups": None}, "no_role"),
        ({"preferred_username": "admin"}, "name_taken"),
        ({"preferred_username": "ADMIN"}, "name_taken"),
        ({"preferred_username": None}, "name_invalid"),
        ({"preferred_username": "\u0430dmin"}, "name_invalid"),
        ({"preferred_username": "a b"}, "name_invalid"),
        ({"preferred_username": "a" * 151}, "name_invalid"),
    ],
)
def test_single_sign_on_of_a_new_person_that_is_refused_creates_nobody(
    provider: StubProvider, person: Claims, reason: str
) -> None:
    provider.person |= person
    before, client = Operator.objects.count(), Client()
    assert_refused(sign_in(client), client, reason)
    assert (Operator.objects.count(), SocialAccount.objects.count()) == (before, 0)


def test_single_sign_on_of_a_disabled_operator_is_refused(provider: StubProvider) -> None:
    sign_in(Client())
    disable_operator(grant(HOST, P.OPERATORS_WRITE), jane())
    client = Client()
    assert_refused(sign_in(client), client, "operator_disabled", "jane")


# --------------------------------------------------------------------------------------------- second factors


def test_single_sign_on_without_a_second_factor_continues_to_our_own(provider: StubProvider) -> None:
    """The console stays closed until the operator's own factor was checked."""
    provider.person["amr"] = ["pwd"]
    client = Client()
    answer = sign_in(client, next="/admin/keyvault/key/")
    assert answer["Location"] == "/admin/second-factor/?next=%2Fadmin%2Fkeyvault%2Fkey%2F"
    assert client.get("/admin/").status_code == 302
    assert jane().last_login is None
    assert entries("operator.single_sign_on_accepted")[-1]["details"]["issuer"] == provider.issuer
    assert entries("operator.signed_in") == []
    seed = new_totp_seed()
    factor = NewFactor(TOTP, {"secret": encrypt_seed(seed)})
    add_second_factor(grant(operator_principal(jane()), P.SESSIONS_WRITE), jane(), factor)
    code = totp_code(seed, datetime.now(UTC))
    assert client.post(answer["Location"], {"second_factor_code": code})["Location"] == "/admin/keyvault/key/"
    assert client.get("/admin/").status_code == 200


def test_single_sign_on_with_a_second_factor_opens_the_console(provider: StubProvider) -> None:
    client = Client()
    sign_in(client)
    assert client.get("/admin/").status_code == 200
    assert is_fresh(client.session, datetime.now(UTC))
    assert entries("operator.signed_in")[-1]["details"]["factor"] == "identity_provider"
    assert jane().last_login is not None


def test_single_sign_on_of_a_new_device_writes_a_notice(provider: StubProvider) -> None:
    """Known devices stay silent, and each sign-in says which it was."""
    client = Client()
    sign_in(client)
    client.get("/admin/")
    sign_in(client)
    assert [entry["details"]["device"] for entry in entries("operator.signed_in")] == ["new", "known"]
    assert Notice.objects.filter(kind=NoticeKind.UNFAMILIAR_SIGN_IN, subject="jane").count() == 1


def test_single_sign_on_records_where_its_session_is_used(provider: StubProvider) -> None:
    """The operator recognizes the session in the list of its own ones."""
    client = Client(headers={"user-agent": FIREFOX}, REMOTE_ADDR="192.0.2.7")
    sign_in(client)
    row = ConsoleSession.objects.get(operator=jane())
    assert (row.address, row.browser) == ("192.0.2.7", "Firefox 128 on Linux")


def test_single_sign_on_shows_the_previous_one(provider: StubProvider) -> None:
    """The operator notices a sign-in by another person. Confirming again is no sign-in."""
    client = Client()
    sign_in(client)
    assert LAST not in text_of(client.get("/admin/"))
    client.post("/admin/logout/")
    sign_in(client)
    assert LAST in text_of(client.get("/admin/"))
    sign_in(client)
    assert LAST not in text_of(client.get("/admin/"))


@pytest.mark.parametrize("authenticated_at", [lambda: int(time.time()) - 3600, lambda: None], ids=["old", "unknown"])
def test_single_sign_on_second_factor_is_recent_only_if_the_provider_says_so(
    provider: StubProvider, authenticated_at: Callable[[], int | None]
) -> None:
    """An hour-old session of the provider is no recent second factor. Confirming again makes the provider ask."""
    provider.changes = {"auth_time": authenticated_at()}
    client = Client()
    sign_in(client)
    assert client.get("/admin/").status_code == 200
    assert not is_fresh(client.session, datetime.now(UTC))
    assert "Confirm with single sign-on" in text_of(client.get("/admin/second-factor/"))
    provider.changes = {}
    url = begin(client)
    assert parse_qs(urlsplit(url).query)["max_age"] == ["1"]
    client.get(agree(url))
    assert is_fresh(client.session, datetime.now(UTC))


def test_single_sign_on_keeps_what_the_session_has_for_the_same_operator_only(provider: StubProvider) -> None:
    """Guarantee: confirming again keeps the receipt of a leak and the environment; another operator gets neither."""
    client, kept = Client(), {"leak_report": [{"key_id": "a" * 16}], "console_environment": "production"}

    def is_kept(person: Claims) -> bool:
        """Sign in beside the session that has these members."""
        session = client.session
        session.update(kept)
        session.save()
        provider.person |= person
        sign_in(client)
        assert client.session.session_key != session.session_key
        operator = Operator.objects.get(username=provider.person["preferred_username"])
        assert client.session[SESSION_KEY] == str(operator.pk)
        return {name: client.session.get(name) for name in kept} == kept

    sign_in(client)
    assert is_kept({})
    assert not is_kept({"groups": ["keys"]}), "a change of roles ends all sessions"
    assert client.get("/admin/").status_code == 200
    assert not is_kept({"sub": "another", "preferred_username": "john"})
    assert is_kept({"amr": ["pwd"]})
    assert client.get("/admin/").status_code == 302, "the provider has not proved a second factor this time"
    assert not is_kept({"sub": "third", "preferred_username": "joan"})


def test_single_sign_on_operator_is_invited_to_a_second_factor_without_a_password(provider: StubProvider) -> None:
    """The link alone does not sign the operator in, because it does not prove who opens it."""
    provider.person["amr"] = ["pwd"]
    sign_in(Client())
    url = f"/admin/invitation/?token={invite(grant(HOST, P.OPERATORS_ENROLL), jane()).reveal()}"
    client = Client()
    shown = text_of(client.get(url))
    assert 'type="password"' not in shown
    found = re.search(r"<code>([A-Z2-7]{32})</code>", shown)
    assert found is not None
    code = totp_code(Plaintext(found[1]), datetime.now(UTC))
    answer = client.post(url, {"second_factor_code": code, "password": PASSWORD, "password_again": PASSWORD})
    assert answer.status_code == 200
    assert not is_signed_in(client)
    assert not jane().has_usable_password()
    assert has_second_factor(jane())
    assert client.get(url).status_code == 404


def test_single_sign_on_operator_accepts_an_invitation_beside_its_session(provider: StubProvider) -> None:
    """The operator who was sent to the page of the second factor opens the invitation in the same browser."""
    provider.person["amr"] = ["pwd"]
    client = Client()
    sign_in(client)
    url = f"/admin/invitation/?token={invite(grant(HOST, P.OPERATORS_ENROLL), jane()).reveal()}"
    sign_in(client)
    found = re.search(r"<code>([A-Z2-7]{32})</code>", text_of(client.get(url)))
    assert found is not None
    code = totp_code(Plaintext(found[1]), datetime.now(UTC))
    assert client.post(url, {"second_factor_code": code}).status_code == 200
    assert not is_signed_in(client)
    assert not ConsoleSession.objects.filter(operator=jane()).exists()


# -------------------------------------------------------------------------------------------------- attacks


Forge = Callable[[StubProvider, Claims], str | None]


def unsigned(provider: StubProvider, claims: Claims) -> str:
    return jwt.encode(claims, "", "none", {"kid": "key-1"})


def signed_with_the_public_key(provider: StubProvider, claims: Claims) -> str:
    """Sign with what everyone knows. PyJWT refuses to help with a PEM."""
    secret = provider.keys[0].private.public_key().public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)
    return jwt.encode(claims, secret, "HS256", {"kid": "key-1"})


def signed_by_another(provider: StubProvider, claims: Claims) -> str:
    return SigningKey("key-1").sign(claims)


def with_an_unknown_key(provider: StubProvider, claims: Claims) -> str:
    return SigningKey("key-of-nobody").sign(claims)


@pytest.mark.parametrize(
    ("forge", "reason"),
    [
        (unsigned, "algorithm_not_allowed"),
        (signed_with_the_public_key, "algorithm_not_allowed"),
        (signed_by_another, "signature_invalid"),
        (with_an_unknown_key, "signing_key_unknown"),
        (lambda provider, claims: "no token", "token_malformed"),
        (lambda provider, claims: None, "token_malformed"),
    ],
)
def test_single_sign_on_with_a_forged_token_is_refused(provider: StubProvider, forge: Forge, reason: str) -> None:
    provider.sign = lambda claims: forge(provider, claims)
    client = Client()
    assert_refused(sign_in(client), client, reason)
    assert not SocialAccount.objects.exists()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"iss": "https://evil.example"}, "issuer_wrong"),
        ({"aud": "another client"}, "audience_wrong"),
        ({"aud": [CLIENT_ID, "another client"]}, "audience_wrong"),
        ({"azp": "another client"}, "audience_wrong"),
        ({"nonce": "of another sign-in"}, "nonce_wrong"),
        ({"nonce": None}, "nonce_wrong"),
        ({"exp": 1_000_000_000}, "token_expired"),
        ({"iat": 4_000_000_000}, "issued_in_future"),
        ({"sub": None}, "subject_invalid"),
        ({"auth_time": 1_000_000_000}, "authentication_too_old"),
    ],
)
def test_single_sign_on_with_a_wrong_claim_is_refused(provider: StubProvider, changes: Claims, reason: str) -> None:
    provider.changes = changes
    client = Client()
    assert_refused(sign_in(client), client, reason)
    assert not SocialAccount.objects.exists()


def test_single_sign_on_state_is_used_once(provider: StubProvider) -> None:
    client = Client()
    url = begin(client)
    assert client.get(agree(url)).status_code == 302
    client.post("/admin/logout/")
    assert_refused(client.get(agree(url)), client, "state_invalid")


def test_single_sign_on_state_is_used_up_by_a_failure(provider: StubProvider) -> None:
    client = Client()
    url = begin(client)
    provider.changes = {"nonce": "of another sign-in"}
    client.get(agree(url))
    provider.changes = {}
    assert client.get(agree(url)).status_code == 403
    assert [reason for _, reason in refusals()] == ["nonce_wrong", "state_invalid"]


@pytest.mark.parametrize("query", ["", "?code=x", "?code=x&state=", "?code=x&state=guessed", "?state=%00&code=%00"])
def test_single_sign_on_response_without_a_state_is_refused(provider: StubProvider, query: str) -> None:
    client = Client()
    begin(client)
    answer = client.get(CALLBACK + query)
    assert answer.status_code in (400, 403)
    assert not is_signed_in(client)


def test_single_sign_on_response_in_another_browser_is_refused(provider: StubProvider) -> None:
    """An attacker cannot make a victim sign in as the attacker, or finish a sign-in that a victim began."""
    callback, other = agree(begin(Client())), Client()
    begin(other)
    assert_refused(other.get(callback), other, "state_invalid")


def test_single_sign_on_state_expires(provider: StubProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client()
    callback = agree(begin(client))
    late = time.time() + STATE_TTL + 1
    monkeypatch.setattr("allauth.socialaccount.internal.statekit.time.time", lambda: late)
    assert_refused(client.get(callback), client, "state_invalid")


def test_single_sign_on_code_is_redeemed_once(provider: StubProvider) -> None:
    victim, thief = Client(), Client()
    callback = agree(begin(victim))
    victim.get(callback)
    state = parse_qs(urlsplit(begin(thief)).query)["state"][0]
    code = parse_qs(urlsplit(callback).query)["code"][0]
    assert_refused(thief.get(CALLBACK, {"code": code, "state": state, "iss": provider.issuer}), thief, "code_refused")


def test_single_sign_on_stolen_code_is_useless_in_another_sign_in(provider: StubProvider) -> None:
    """The code belongs to another PKCE challenge."""
    thief = Client()
    code = parse_qs(urlsplit(agree(begin(Client()))).query)["code"][0]
    state = parse_qs(urlsplit(begin(thief)).query)["state"][0]
    assert_refused(thief.get(CALLBACK, {"code": code, "state": state, "iss": provider.issuer}), thief, "code_refused")


def test_single_sign_on_without_its_pkce_verifier_is_refused(provider: StubProvider) -> None:
    client = Client()
    callback = agree(begin(client))
    session = client.session
    ((state, *_),) = session[STATES_SESSION_KEY].values()
    del state["pkce_code_verifier"]
    session.save()
    assert_refused(client.get(callback), client, "state_invalid")
    assert provider.requests["/token"] == 0


@pytest.mark.parametrize("issuer", ["https://evil.example", None])
def test_single_sign_on_response_of_another_issuer_is_refused(provider: StubProvider, issuer: str | None) -> None:
    """Mix-up: the code of one provider is not sent to another one (RFC 9207)."""
    client = Client()
    query = parse_qs(urlsplit(agree(begin(client))).query)
    answer = {"code": query["code"][0], "state": query["state"][0], **({"iss": issuer} if issuer else {})}
    assert_refused(client.get(CALLBACK, answer), client, "issuer_mixed_up")
    assert provider.requests["/token"] == 0


def test_single_sign_on_begun_with_another_issuer_is_refused(provider: StubProvider) -> None:
    client = Client()
    callback = agree(begin(client))
    session = client.session
    ((state, *_),) = session[STATES_SESSION_KEY].values()
    state["data"]["issuer"] = "https://id.example.com"
    session.save()
    assert_refused(client.get(callback), client, "issuer_mixed_up")


def test_single_sign_on_that_the_provider_refuses_is_refused(provider: StubProvider) -> None:
    client = Client()
    state = parse_qs(urlsplit(begin(client)).query)["state"][0]
    answer = client.get(CALLBACK, {"error": "access_denied", "state": state, "iss": provider.issuer})
    assert_refused(answer, client, "provider_refused")


def test_single_sign_on_after_a_key_rotation_succeeds(provider: StubProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    sign_in(Client())
    provider.rotate("key-2")
    monkeypatch.setattr("keyvault.backends.identity_provider.REFETCH_SECONDS", 0.0)
    client = Client()
    assert sign_in(client).status_code == 302
    assert is_signed_in(client)


def test_single_sign_on_flood_of_unknown_keys_reads_the_keys_once(provider: StubProvider) -> None:
    provider.sign = lambda claims: with_an_unknown_key(provider, claims)
    for _ in range(5):
        assert sign_in(Client()).status_code == 403
    assert provider.requests["/jwks"] == 1
    assert refusals() == [("unknown", "signing_key_unknown")]
    assert entries("operator.sign_in_refused")[-1]["details"]["count"] == 5


# --------------------------------------------------------------------------------------------------- the pages


def test_single_sign_on_while_the_provider_is_down_says_so(provider: StubProvider) -> None:
    client = Client()
    callback = agree(begin(client))
    provider.metadata = {"issuer": "https://evil.example"}
    identity_provider_client.cache_clear()
    assert_refused(client.get(callback), client, "provider_unavailable", status=503)
    assert client.post(BEGIN).status_code == 503


@pytest.mark.parametrize(
    "reply", [b"", b"1", b"[]", b"access_token=x", b'["access_token"]', b'{"access_token": 1}', b'"access_token"']
)
def test_single_sign_on_with_a_reply_that_is_no_token_is_refused(
    provider: StubProvider, monkeypatch: pytest.MonkeyPatch, reply: bytes
) -> None:
    def respond(session: requests.Session, method: str, url: str, **options: Any) -> requests.Response:
        response = requests.Response()
        response.status_code, response.raw = 200, io.BytesIO(reply)
        response.headers["content-type"] = "application/json"
        return response

    client = Client(raise_request_exception=False)
    callback = agree(begin(client))
    monkeypatch.setattr(requests.Session, "request", respond)
    assert client.get(callback).status_code in (403, 503)
    assert not is_signed_in(client)


def test_single_sign_on_is_offered_only_when_configured(desk: Desk) -> None:
    client = Client()
    assert "single sign-on" not in text_of(client.get(LOGIN))
    assert [client.post(BEGIN).status_code, client.get(CALLBACK).status_code] == [404, 404]


def test_single_sign_on_button_is_on_the_sign_in_page(provider: StubProvider) -> None:
    page = text_of(Client().get(LOGIN))
    assert "Sign in with single sign-on" in page
    assert f'action="{BEGIN}"' in page
    assert provider.requests.total() == 0


@pytest.mark.parametrize(
    ("wanted", "opened"),
    [
        ("/admin/keyvault/key/?q=x", "/admin/keyvault/key/?q=x"),
        ("https://evil.example/", "/admin/"),
        ("//evil.example/", "/admin/"),
        ("javascript:alert(1)", "/admin/"),
        ("", "/admin/"),
    ],
)
def test_single_sign_on_opens_only_pages_of_the_console(provider: StubProvider, wanted: str, opened: str) -> None:
    assert sign_in(Client(), next=wanted)["Location"] == opened


def test_single_sign_on_begins_by_post_with_a_csrf_token(provider: StubProvider) -> None:
    """Another site can neither begin a sign-in nor fill the table of sessions."""
    client = Client(enforce_csrf_checks=True)
    assert [client.get(BEGIN).status_code, client.post(BEGIN).status_code] == [405, 403]
    assert not ConsoleSession.objects.exists()


def test_single_sign_on_under_way_is_kept_for_minutes_only(provider: StubProvider) -> None:
    client = Client()
    callback, now = agree(begin(client)), datetime.now(UTC)
    assert ConsoleSession.objects.get().expire_date < now + timedelta(seconds=STATE_TTL + 1)
    client.get(callback)
    assert ConsoleSession.objects.get().expire_date > now + timedelta(seconds=STATE_TTL + 1)
    assert STATES_SESSION_KEY not in client.session


def test_single_sign_on_gives_the_session_a_new_key(provider: StubProvider) -> None:
    client = Client()
    callback = agree(begin(client))
    before = client.session.session_key
    client.get(callback)
    assert client.session.session_key != before
    assert not ConsoleSession.objects.filter(pk=session_id(before or "")).exists()


def test_single_sign_on_of_a_signed_in_operator_must_authenticate_again(provider: StubProvider) -> None:
    client = Client()
    sign_in(client)
    assert parse_qs(urlsplit(begin(client)).query)["max_age"] == ["1"]
    provider.changes = {"auth_time": int(time.time()) - 3600}
    assert sign_in(client).status_code == 403
    assert refusals() == [("unknown", "authentication_too_old")]


def test_single_sign_on_pages_are_kept_from_caches_and_referrers(provider: StubProvider) -> None:
    client = Client()
    for answer in (client.post(BEGIN), client.get(agree(begin(client)))):
        assert "no-store" in answer["Cache-Control"]
        assert answer["Referrer-Policy"] == "no-referrer"
        assert "form-action 'self'" in answer["Content-Security-Policy"]
