"""Names of modules and classes, and the only places of `Grant(...)` and `.reveal()`."""

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterator

from tests.architecture.checkout import CODE, calls, python_files, relative

SHAPELESS = re.compile(r"(?:.*_)?(?:utils?|helpers?|common|misc|core|managers?)")
CAMEL_CASE = re.compile(r"_?[A-Z][A-Za-z]*[a-z][A-Za-z]*")

THE_ONE_GRANT = "keyvault/access/decision.py"

REVEALS: dict[str, str] = {
    "keyvault/admin/framework/pages.py": "the one page that shows a secret",
    "keyvault/admin/account/second_factors.py": "the pages that show the seed and the recovery codes of their operator",
    "keyvault/admin/account/single_sign_on.py": "hands the client secret to allauth",
    "keyvault/api/idempotency.py": "the one answer that shows a new secret, and its replay",
    "keyvault/backends/backup_archive.py": "derives the key of an archive from its passphrase",
    "keyvault/backends/central.py": "sends the token of a region to the central service",
    "keyvault/backends/local.py": "seals and encrypts it",
    "keyvault/domain/provider_connections.py": "looks at a provider's credentials before they are stored",
    "keyvault/backends/vault/client.py": "hands its token to hvac",
    "keyvault/backends/vault/diagnosis.py": "hands a token of its own to hvac",
    "keyvault/backends/vault/kv.py": "writes it to the secrets manager",
    "keyvault/backends/vault/logins.py": "proves with it who the process is, and keeps it in a private file",
    "keyvault/domain/digests.py": "hashes it",
    "keyvault/domain/recipient_keys.py": "seals it to the recipient's public key",
    "keyvault/domain/sealing.py": "seals it",
    "keyvault/management/commands/add_webhook.py": "prints a new signing secret, asked for with --reveal",
    "keyvault/management/commands/create_service_token.py": "prints a new token, asked for with --reveal",
    "keyvault/management/commands/invite_operator.py": "prints an invitation, and with --reveal a first sign-in",
    "keyvault/management/commands/issue_key.py": "prints a new key, asked for with --reveal",
    "keyvault/management/commands/reset_operator_password.py": "prints a new password, asked for with --reveal",
    "keyvault/management/commands/rotate_service_token.py": "prints the new token, asked for with --reveal",
    "keyvault/management/commands/run.py": "prints the passwords, TOTP secrets and the curl line of `make run`",
    "keyvault/services/alarm_messages.py": "hands the password of the mail server to smtplib",
    "keyvault/services/audit/signers.py": "decodes the local signing key",
    "keyvault/services/operators/operators.py": "hands a password to Django's hasher",
    "keyvault/services/peppers/ring.py": "decodes a pepper",
    "keyvault/services/sessions/invitations.py": "hashes an invitation's token",
    "keyvault/services/sessions/second_factor_adapter.py": "hands a decrypted seed to allauth",
    "keyvault/services/sessions/second_factors.py": "computes codes of a seed, and compares recovery codes",
    "keyvault/services/sessions/sign_in.py": "hands a password to Django's hasher",
    "keyvault/wire/webhooks.py": "signs with it",
    "rotation/management/commands/collect_key.py": "prints a key that was collected",
    "rotation/management/demo/issuing.py": "the merchant of the demo takes its key into use",
    "rotation/management/demo/own_vault.py": "gives the demo's own server its root token",
    "rotation/management/demo/scenario.py": "prints the sign-ins of the demo's operators",
    "rotation/management/demo/traces.py": "looks for every secret in what the demo leaves behind",
    "rotation/management/demo/verifier.py": "presents the demo's keys over HTTP",
}
"""The files that may turn a plaintext into text, each with its reason; a new one asks for a review."""

ISO_FORMATS: dict[str, str] = {
    "keyvault/admin/framework/keyset.py": "the cursor of a list",
    "keyvault/admin/oversight/audit.py": "the query of a link to older entries",
    "keyvault/domain/audit.py": "an audit entry, which the hash chain covers",
    "keyvault/domain/checkpoints.py": "a checkpoint, which its signature covers",
    "keyvault/domain/revocation_log.py": "a line of the revocation log, which its checksum covers",
    "keyvault/domain/timestamps.py": "the one text form",
    "keyvault/services/alarm_messages.py": "the internal name of a reminder",
    "keyvault/services/audit/checkpoint_marks.py": "a label in the secret backend, as earlier releases wrote it",
    "keyvault/services/usage/recorder.py": "parameters of a query",
    "rotation/admin/schedule_calendar.py": "the cursor of a day, and a day",
    "rotation/admin/schedule_forms.py": "the input of a parser",
}
"""The files that may format a time without `format_timestamp`, whose texts stay inside or must not change."""

VERB_AND_NOUN = re.compile(
    r"(?:abort|accept|add|approve|bootstrap|check|collect|confirm|create|disable|end|export|extend|hold|invite|issue|list"
    r"|offboard|pause|reconcile|reissue|reject|release|remove|replay|report|request|reset|resume|retire|review|revoke"
    r"|rotate|seed|set|show|waive|withdraw)_[a-z_]+"
)
OTHER_COMMANDS = re.compile(
    r"audit_verify|backup|changepassword|createsuperuser|demo|flush|loaddata|redact|restore|run|setup|verifier"
)
"""Django's own names, single verbs, and `audit_verify` and `verifier`, which others already call."""

SHARED_WITH_THE_CLIENT = {
    "Application": "the term of WSGI and of ASGI, in the middleware for each",
    "KeySource": "where a key comes from: public, as in KeySourceError. The model has the sources of a key's uses",
    "KeyvaultError": "the root of the exceptions, here and in the client",
    "KeyvaultMiddleware": "public: one for each framework, chosen by the module that is imported",
    "NotFoundError": "public: the client raises it for the service's 404",
    "RateLimitedError": "public: the client raises it for the service's 429",
    "Verifier": "public: it asks the service. The model has the processes that verify",
}
"""Names of two classes, one of them in the Python client. Any other shared name is an accident."""


def test_names_a_time_has_one_text_form() -> None:
    """Guarantee: times in responses, log lines, audit details, messages and pages are RFC 3339 with `Z`."""
    found = {relative(path) for path in python_files(*CODE) if ".isoformat(" in path.read_text()}
    assert found == set(ISO_FORMATS)


def test_names_a_command_is_a_verb_and_a_noun() -> None:
    paths = python_files("keyvault/management/commands", "rotation/management/commands")
    names = {path.stem for path in paths if path.stem != "__init__"}
    assert "rotate_key" in names
    assert {name for name in names if not (VERB_AND_NOUN.fullmatch(name) or OTHER_COMMANDS.fullmatch(name))} == set()


def test_names_no_module_is_a_catch_all() -> None:
    found = {part for path in python_files(*CODE, "tests") for part in (path.with_suffix(""), path.parent)}
    assert sorted(relative(path) for path in found if SHAPELESS.fullmatch(path.name)) == []


def names_of_top_level_classes(module: ast.Module) -> Iterator[str]:
    yield from (node.name for node in module.body if isinstance(node, ast.ClassDef))


def names_of_types(module: ast.Module) -> Iterator[str]:
    """Yield the names of all classes, and of the module's type aliases and type variables of several letters."""
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef):
            yield node.name
    for node in module.body:
        for target in node.targets if isinstance(node, ast.Assign) else ():
            if isinstance(target, ast.Name) and CAMEL_CASE.fullmatch(target.id):
                yield target.id


def find_shared(names: Callable[[ast.Module], Iterator[str]], *folders: str) -> dict[str, list[str]]:
    """Return the names that occur more than once, and their files. `Meta`, `Command` and `Migration` are Django's."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in python_files(*folders):
        for name in names(ast.parse(path.read_text())):
            if name not in {"Meta", "Command", "Migration"}:
                places[name].append(relative(path))
    return {name: found for name, found in places.items() if len(found) > 1}


def test_names_no_two_classes_or_type_aliases_share_one() -> None:
    """One name, one thing."""
    shared = find_shared(names_of_types, *CODE, "clients/python")
    assert {name: found for name, found in shared.items() if name not in SHARED_WITH_THE_CLIENT} == {}
    assert set(SHARED_WITH_THE_CLIENT) <= set(shared)


def test_names_no_two_classes_of_the_tests_share_one() -> None:
    """One name, one thing. A class inside a function or a class is exempt."""
    assert find_shared(names_of_top_level_classes, "tests") == {}


def test_names_a_grant_is_made_in_exactly_one_place() -> None:
    """Nothing starts valid: the one `Grant(...)` call is the end of the one decision function."""
    made = [f"{relative(path)}:{call.lineno}" for path in python_files(*CODE) for call in calls(path, "Grant")]
    assert [place.partition(":")[0] for place in made] == [THE_ONE_GRANT], made


def test_names_plaintext_is_revealed_only_where_it_was_decided() -> None:
    """Every file where a secret leaves its redacted type is listed, with a reason, and no other is."""
    reveals = {relative(path) for path in python_files(*CODE) if calls(path, "reveal")}
    assert reveals == set(REVEALS)
