"""Create keys and tokens with the peers' own code: `python -m tests.bench.peers.seed_keys OUT --keys 2000`.

Each Knox user has one token, which is its fastest case: Knox reads all tokens of a user at each request.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import django


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.peers.seed_keys")
    parser.add_argument("out", type=Path)
    parser.add_argument("--keys", type=int, default=2000)
    options = parser.parse_args()
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.bench.peers.settings")
    django.setup()
    from django.core.management import call_command
    from django.db import transaction

    call_command("migrate", interactive=False, verbosity=0)
    with transaction.atomic():
        made = {"api_key": _api_keys(options.keys), "knox": _knox_tokens(options.keys)}
    options.out.touch(mode=0o600)
    options.out.write_text(json.dumps(made))
    return 0


def _api_keys(count: int) -> dict[str, Any]:
    from django.utils.module_loading import import_string

    model = import_string("rest_framework_api_key.models.APIKey")
    keys = [model.objects.create_key(name=f"key {number}") for number in range(count + 1)]
    revoked, text = keys.pop()
    revoked.revoked = True
    revoked.save()
    return {"keys": [text for _, text in keys], "revoked": text}


def _knox_tokens(count: int) -> dict[str, Any]:
    from django.contrib.auth.models import User
    from django.utils.module_loading import import_string

    model = import_string("knox.models.AuthToken")
    users = User.objects.bulk_create([User(username=f"user-{number}") for number in range(count + 1)])
    tokens = [model.objects.create(user=user) for user in users]
    revoked, text = tokens.pop()
    revoked.delete()
    return {"keys": [text for _, text in tokens], "revoked": text}


if __name__ == "__main__":
    sys.exit(main())
