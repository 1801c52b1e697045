"""Merchants, operators, keys and tokens for all tests, made through the real services.

    tam = make_operator("tam", Role.TECHNICAL_ACCOUNT_MANAGER)
    make_merchant("acme")
    key, text = issue(account("acme", Environment.SANDBOX))
    revoke_key(grant(tam, Permission.KEYS_REVOKE, key.credential.account), key, RevocationReason.SUPERSEDED)

Nothing here needs a fixture of its own: a builder that makes digests sees to the peppers itself. Their rows go
with each test's rollback or flush while the keystore of `data_dir` stays for the whole run, and
`ensure_peppers` adopts what it finds there, so that rows, keystore and the process's cache always agree. A
test that asks for peppers and builds nothing calls `have_peppers()`; one that harms a keystore does so inside
`own_keystore(tmp_path)`.

Every builder acts at `now()` unless it gets `at=`.
"""

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from unittest import mock

from django.contrib.auth.hashers import PBKDF2PasswordHasher
from django.test import override_settings

from keyvault.access import principals
from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission
from keyvault.access.principals import HOST, Channel, Principal
from keyvault.access.roles import Role
from keyvault.access.scopes import EVERYWHERE, AccessScope
from keyvault.domain.environments import Environment
from keyvault.domain.issuance import Delivery, IssuanceState
from keyvault.domain.keys import KeyKind
from keyvault.domain.keystring import StringScope
from keyvault.domain.plaintext import Plaintext
from keyvault.domain.revocation_log import Opened, line_bytes
from keyvault.models import Account, IssuanceRequest, Key, Merchant, Operator, PepperVersion, ServiceToken
from keyvault.services.issuance import requests
from keyvault.services.merchants.merchants import create_merchant, find_account
from keyvault.services.operators.operators import create_operator
from keyvault.services.peppers.ring import ensure_peppers, list_served_sets, load_peppers
from keyvault.services.recording.authorization import authorize, operator_principal
from keyvault.services.secrets.backend import secret_backend
from keyvault.services.secrets.stored_copies import read_string
from keyvault.services.tokens.service_tokens import DEFAULT_DAYS, create_service_token
from keyvault.services.work import leases

from .starting_rows import start_with

PASSWORD = "correct horse battery staple"
"""Password of every operator that is made here."""

SANDBOX, PRODUCTION = Environment.SANDBOX, Environment.PRODUCTION


def now() -> datetime:
    return datetime.now(UTC)


INSTALLATION = "installation-of-the-tests"


def renew_revocation_log(path: Path) -> None:
    """An empty log of this host, as the first start of the tests' installation makes it."""
    path.write_bytes(line_bytes(Opened(INSTALLATION, now())))


def forget_evidence(keystore: Path) -> None:
    """Empty the keystore's evidence of earlier tests' databases, which would make this one's look set back."""
    if not keystore.exists():
        return
    with closing(sqlite3.connect(keystore, timeout=20, isolation_level=None)) as connection:
        has_table = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'records'").fetchone()
        if has_table and connection.execute("SELECT 1 FROM records WHERE mount = 'evidence' LIMIT 1").fetchone():
            connection.execute("DELETE FROM records WHERE mount = 'evidence'")


def have_peppers() -> None:
    """The peppers' rows, and the peppers in this process's memory. Every builder that needs them calls it.

    A keystore outlives the databases of one process of tests, which are all of the same installation.
    """
    served = list_served_sets()
    if not {*PepperVersion.objects.values_list("pepper_set", flat=True)}.issuperset(served):
        start_with(_have_peppers)
    for pepper_set in served:
        load_peppers(pepper_set)


def _have_peppers() -> None:
    with mock.patch("keyvault.services.peppers.installation.mint_installation_id", return_value=INSTALLATION):
        ensure_peppers(now())


@contextmanager
def own_keystore(folder: Path) -> Iterator[None]:
    """A keystore and peppers of this test's own, in a folder that it may harm; call `have_peppers` inside."""
    with override_settings(DATA_DIR=folder, MASTER_KEY=""):
        forget_keystore()
        try:
            yield
        finally:
            forget_keystore()


def forget_keystore() -> None:
    """Forget the open backend and the loaded peppers, as in a new process."""
    secret_backend.cache_clear()
    load_peppers.cache_clear()


def grant(
    principal: Principal,
    permission: Permission,
    account: Account | None = None,
    requester_person: str | None = None,
    *,
    at: datetime | None = None,
    within: AccessScope = EVERYWHERE,
) -> Grant:
    """Return the grant of `authorize`, or raise its error."""
    return authorize(principal, permission, account, now=at or now(), requester_person=requester_person, within=within)


def on_host(operator: principals.OperatorPrincipal) -> principals.OperatorPrincipal:
    """Return the operator as a command line names it."""
    return replace(operator, channel=Channel.COMMAND_LINE, host_user="root")


# ------------------------------------------------------------------------------------------------- who and what


@contextmanager
def cheap_password_hashes() -> Iterator[None]:
    """Hash passwords with one iteration. Production's million takes a third of a second for each operator."""
    with mock.patch.object(PBKDF2PasswordHasher, "iterations", 1):
        yield


def make_operator(
    username: str,
    *roles: Role,
    person: str | None = None,
    scope: AccessScope = EVERYWHERE,
    channel: Channel = Channel.CONSOLE,
    host_user: str | None = None,
) -> principals.OperatorPrincipal:
    """A new log-in with PASSWORD, as the principal that the console makes of it; `person` of an earlier one."""
    with cheap_password_hashes():
        row = create_operator(
            grant(HOST, Permission.OPERATORS_ENROLL),
            username=username,
            roles=roles,
            scope=scope,
            password=Plaintext(PASSWORD),
            person=person,
        )
    return operator_principal(row, channel, host_user)


def the_operator(username: str, *roles: Role) -> principals.OperatorPrincipal:
    """The operator of that name, made with these roles at the first call."""
    row = Operator.objects.filter(username=username).first()
    return make_operator(username, *roles) if row is None else operator_principal(row)


def make_merchant(merchant_id: str = "acme", name: str = "") -> Merchant:
    """A merchant with its two accounts."""
    return create_merchant(
        grant(HOST, Permission.MERCHANTS_WRITE), merchant_id=merchant_id, name=name or merchant_id.title()
    )


def account(merchant_id: str = "acme", environment: Environment = SANDBOX) -> Account:
    return find_account(merchant_id, environment)


# --------------------------------------------------------------------------------------------------------- keys


def request_key(
    account: Account,
    *,
    kind: KeyKind = KeyKind.PRIVATE,
    label: str = "checkout",
    delivery: Delivery = Delivery.SECRET_BACKEND,
    recipient_public_key: str = "",
    expires_in_days: int | None = None,
    by: principals.OperatorPrincipal | principals.Service | None = None,
    at: datetime | None = None,
) -> IssuanceRequest:
    """Make a request, approved in sandbox and pending in production. `by`: the operator `tam` by default."""
    asking = by or the_operator("tam", Role.TECHNICAL_ACCOUNT_MANAGER)
    return requests.request_issuance(
        grant(asking, Permission.ISSUANCE_REQUEST, account, at=at),
        account,
        kind=kind,
        label=label,
        delivery=delivery,
        recipient_public_key=recipient_public_key,
        expires_in_days=expires_in_days,
    )


def approve(
    request: IssuanceRequest, *, by: principals.OperatorPrincipal | None = None, at: datetime | None = None
) -> IssuanceRequest:
    """Approve the request. `by`: the operator `approver` by default."""
    approving = by or the_operator("approver", Role.APPROVER)
    allowed = grant(approving, Permission.ISSUANCE_APPROVE, request.account, request.requester_person, at=at)
    return requests.approve_issuance(allowed, request, request.plan_digest)


def issue_request(request: IssuanceRequest, *, at: datetime | None = None) -> Key:
    """Perform the worker's part of an approved request, and refresh `request`."""
    have_peppers()
    moment = at or now()
    lease = leases.claim(f"issuance:{request.issuance_request_id}", moment)
    assert lease is not None, "another worker holds the lease"
    key = requests.issue_approved(request, lease, moment, lambda: moment)
    leases.release(lease)
    return key


def issue(
    account: Account,
    *,
    kind: KeyKind = KeyKind.PRIVATE,
    label: str = "checkout",
    delivery: Delivery = Delivery.SECRET_BACKEND,
    recipient_public_key: str = "",
    expires_in_days: int | None = None,
    by: principals.OperatorPrincipal | principals.Service | None = None,
    at: datetime | None = None,
) -> tuple[Key, Plaintext]:
    """An active key of a new credential, asked for by `tam` and, in production, approved by `approver`.

    Its string is read from the secret backend, as the merchant would; the request stays `issued`.
    """
    request = request_key(
        account,
        kind=kind,
        label=label,
        delivery=delivery,
        recipient_public_key=recipient_public_key,
        expires_in_days=expires_in_days,
        by=by,
        at=at,
    )
    if request.state == IssuanceState.PENDING:
        approve(request, at=at)
    key = issue_request(request, at=at)
    return key, read_string(key)


# ------------------------------------------------------------------------------------------------------- tokens


def make_token(
    *permissions: Permission,
    name: str = "gateway",
    scope: StringScope = StringScope.ALL,
    merchants: Iterable[str] | None = None,
    lifetime_days: int = DEFAULT_DAYS,
    is_probe: bool = False,
    by: Principal = HOST,
    at: datetime | None = None,
) -> tuple[ServiceToken, Plaintext]:
    """A service token with these permissions; `keys:verify` and `keys:read` when none is named."""
    have_peppers()
    return create_service_token(
        grant(by, Permission.TOKENS_WRITE, at=at),
        name=name,
        scope=scope,
        permissions=permissions or (Permission.KEYS_VERIFY, Permission.KEYS_READ),
        merchants=merchants,
        lifetime_days=lifetime_days,
        is_probe=is_probe,
    )
