"""Insert keys into a database, in a separate process: `python -m tests.bench.seed_keys OUT --keys 10000`.

The environment names data folder and database. The keys are valid: they have the product's format and checksum, and
digests under the real pepper. They are inserted in bulk without audit entries. Accounts have a limit of 1,000,000 a
second, so that no request is limited. The key strings are written to the file OUT as JSON; only its owner can read it.
"""

import argparse
import json
import os
import secrets
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import django

MERCHANTS = 100
NETWORK = "203.0.113.0/24"
"""Allow-list of a credential. The client address of every benchmark request is in it."""

OPERATOR = "admin"
"""An operator of every permission that the benchmarks need."""

BATCH_ROWS = 1000


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.seed_keys")
    parser.add_argument("out", type=Path)
    parser.add_argument("--keys", type=int, default=10_000)
    parser.add_argument("--listed", type=int, default=10, help="percent of the credentials with an allow-list")
    parser.add_argument("--to-revoke", type=int, default=0)
    options = parser.parse_args()
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "keyvault.project.settings")
    django.setup()
    from django.core.management import call_command

    call_command("setup", verbosity=0, stdout=sys.stderr)
    made = _fill(options.keys, options.to_revoke, options.listed)
    options.out.touch(mode=0o600)
    options.out.write_text(json.dumps(made))
    return 0


def _fill(keys: int, to_revoke: int, listed: int) -> dict[str, Any]:
    from keyvault.access.permissions import Permission
    from keyvault.access.roles import Role
    from keyvault.domain.environments import Environment
    from keyvault.domain.keystring import StringScope
    from keyvault.domain.revocation import RevocationReason
    from keyvault.models import Account, Key
    from keyvault.services.keys.lifecycle import revoke_key
    from tests.factories import grant, make_merchant, make_token, the_operator

    for number in range(MERCHANTS):
        make_merchant(f"merchant-{number:03}")
    unguarded(Account).update(limit_count=1_000_000, limit_seconds=1)
    accounts = list(Account.objects.filter(environment=Environment.PRODUCTION).order_by("merchant_id"))
    permissions = (Permission.KEYS_VERIFY, Permission.KEYS_REPLICATE, Permission.KEYS_REVOKE)
    _, token = make_token(*permissions, name="benchmark", scope=StringScope.PRODUCTION)
    texts = add_keys(accounts, keys + to_revoke + 1, listed)
    *valid, revoked = texts
    key = Key.objects.select_related("credential__account__merchant").get(key_id=key_id_of(revoked))
    admin = the_operator(OPERATOR, Role.KEY_ADMINISTRATOR)
    revoke_key(grant(admin, Permission.KEYS_REVOKE, key.credential.account), key, RevocationReason.SUPERSEDED)
    return {
        "token": token.reveal(),
        "keys": valid[:keys],
        "to_revoke": valid[keys:],
        "revoked": revoked,
        "unknown": mint().text.reveal(),
    }


def unguarded(model: Any) -> Any:
    """Return all rows of the model, for writes without an audit entry."""
    from django.db import models

    return models.QuerySet(model)


def mint() -> Any:
    """Return a private key string of production that was never issued."""
    from django.conf import settings

    from keyvault.domain.keystring import StringKind, StringScope, mint_keystring

    return mint_keystring(settings.KEY_PREFIX, StringKind.PRIVATE, StringScope.PRODUCTION, secrets.token_bytes)


def key_id_of(text: str) -> str:
    """Return the key id in a key string."""
    return text.rpartition("_")[2][:16]


def has_allow_list(number: int, percent: int) -> bool:
    return (number + 1) * percent // 100 > number * percent // 100


def add_keys(accounts: list[Any], count: int, listed: int) -> list[str]:
    """Insert active private keys, each with its own credential, evenly over the accounts; return their strings.

    `listed`: percent of the credentials that have an allow-list, evenly among the others.
    """
    from keyvault.domain.digests import PepperSet
    from keyvault.domain.ids import mint_id
    from keyvault.domain.issuance import Delivery
    from keyvault.domain.keys import KeyKind, KeyState
    from keyvault.models import Credential, Key
    from keyvault.services.peppers.ring import load_peppers

    now, peppers = datetime.now(UTC), load_peppers(PepperSet.PRODUCTION)
    credentials, keys, texts = [], [], []
    for number in range(count):
        minted = mint()
        digest, pepper_version = peppers.digest(minted.text)
        credential = Credential(
            credential_id=mint_id("crd", secrets.token_bytes),
            account=accounts[number % len(accounts)],
            account_environment=accounts[number % len(accounts)].environment,
            kind=KeyKind.PRIVATE,
            label="benchmark",
            delivery=Delivery.SECRET_BACKEND,
            networks=[NETWORK] if has_allow_list(number, listed) else [],
            created_at=now,
        )
        credentials.append(credential)
        keys.append(
            Key(
                key_id=minted.key_id,
                credential=credential,
                account_environment=credential.account_environment,
                digest=digest,
                pepper_version=pepper_version,
                state=KeyState.ACTIVE,
                created_at=now,
                activated_at=now,
            )
        )
        texts.append(minted.text.reveal())
    unguarded(Credential).bulk_create(credentials, BATCH_ROWS)
    unguarded(Key).bulk_create(keys, BATCH_ROWS)
    return texts


if __name__ == "__main__":
    sys.exit(main())
