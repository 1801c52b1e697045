"""Fills a database with keys, in a process of its own: `python -m tests.bench.stock OUT --keys 10000`.

The environment names data folder and database. The keys are genuine: strings of the real alphabet and checksum,
digests under the real pepper, rows in the real tables; only that they were written in bulk, below the guard that
wants an audit entry for each. Accounts have a limit of 1,000,000 a second, so that no limit answers. OUT gets the
strings as JSON, for its owner only.
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
"""What credentials with an allow-list are good from; all requests of the benchmarks come from there."""

BATCH_ROWS = 1000


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.stock")
    parser.add_argument("out", type=Path)
    parser.add_argument("--keys", type=int, default=10_000)
    parser.add_argument("--listed", type=int, default=10, help="percent of the credentials with an allow-list")
    parser.add_argument("--to-revoke", type=int, default=0)
    asked = parser.parse_args()
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "keyvault.project.settings")
    django.setup()
    from django.core.management import call_command

    call_command("setup", verbosity=0, stdout=sys.stderr)
    made = _fill(asked.keys, asked.to_revoke, asked.listed)
    asked.out.touch(mode=0o600)
    asked.out.write_text(json.dumps(made))
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
    _, token = make_token(Permission.KEYS_VERIFY, name="benchmark", scope=StringScope.PRODUCTION)
    texts = add_keys(accounts, keys + to_revoke + 1, listed)
    *valid, revoked = texts
    key = Key.objects.select_related("credential__account__merchant").get(key_id=id_of(revoked))
    admin = the_operator("admin", Role.KEY_ADMINISTRATOR)
    revoke_key(grant(admin, Permission.KEYS_REVOKE, key.credential.account), key, RevocationReason.SUPERSEDED)
    return {
        "token": token.reveal(),
        "keys": valid[:keys],
        "to_revoke": valid[keys:],
        "revoked": revoked,
        "unknown": mint().text.reveal(),
    }


def unguarded(model: Any) -> Any:
    """The model's rows, below the guard that wants each write recorded."""
    from django.db import models

    return models.QuerySet(model)


def mint() -> Any:
    """Return a private key string of production that was never issued."""
    from django.conf import settings

    from keyvault.domain.keystring import StringKind, StringScope, mint_keystring

    return mint_keystring(settings.KEY_PREFIX, StringKind.PRIVATE, StringScope.PRODUCTION, secrets.token_bytes)


def id_of(text: str) -> str:
    """The key id in a key string of our own."""
    return text.rpartition("_")[2][:16]


def is_listed(number: int, percent: int) -> bool:
    return (number + 1) * percent // 100 > number * percent // 100


def add_keys(accounts: list[Any], count: int, listed: int) -> list[str]:
    """That many active private keys, one to a credential, over the accounts in turn; their strings.

    `listed` percent of the credentials have an allow-list, evenly among the others.
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
            networks=[NETWORK] if is_listed(number, listed) else [],
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
