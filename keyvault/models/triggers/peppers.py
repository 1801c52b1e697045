"""Rules of peppers: digests move to newer versions only, and a version in use is not retired."""

from collections.abc import Iterator
from dataclasses import dataclass

from keyvault.models.triggers.rules import Frozen, WriteGuard, is_changed, set_again, short_name, sql_list
from keyvault.models.triggers.tables import DEAD_KEY_STATES

_PEPPERS = "keyvault_pepperversion"


@dataclass(frozen=True, slots=True)
class Digested:
    """A table of digests. `pepper_set`: SQL of a row's set. `verifiable`: SQL condition that the row still verifies."""

    table: str
    pepper_set: str
    verifiable: str

    def guards(self) -> Iterator[WriteGuard]:
        short = short_name(self.table)
        yield WriteGuard(
            f"{short}_digest_stays",
            self.table,
            "UPDATE",
            "(NEW.digest <> OLD.digest OR NEW.pepper_version <> OLD.pepper_version) "
            "AND (NEW.digest = OLD.digest OR NEW.pepper_version <= OLD.pepper_version)",
            f"a {short} digest is replaced only by one with a newer pepper",
        )
        for when, moved in (("INSERT", ""), ("UPDATE", "NEW.pepper_version <> OLD.pepper_version AND ")):
            yield WriteGuard(
                f"{short}_pepper_{when.lower()}",
                self.table,
                when,
                f"{moved}EXISTS (SELECT 1 FROM {_PEPPERS} p "  # noqa: S608  our own names only
                "WHERE p.number = NEW.pepper_version "
                f"AND p.retired_at IS NOT NULL AND p.pepper_set = {self.pepper_set.format(row='NEW')})",
                f"no {short} is hashed with a retired pepper",
            )
        yield WriteGuard(
            f"pepperversion_of_{short}",
            _PEPPERS,
            "UPDATE",
            f"NEW.retired_at IS NOT NULL AND OLD.retired_at IS NULL "  # noqa: S608  our own names only
            f"AND EXISTS (SELECT 1 FROM {self.table} d WHERE d.pepper_version = NEW.number "
            f"AND {self.verifiable.format(row='d')} AND {self.pepper_set.format(row='d')} = NEW.pepper_set)",
            f"a pepper of a valid {short} is not retired",
        )


_VALID_AT_RETIREMENT = "{row}.revoked_at IS NULL AND {row}.expires_at > NEW.retired_at"

DIGESTED = (
    Digested(
        "keyvault_key",
        "(SELECT a.environment FROM keyvault_credential c JOIN keyvault_account a ON a.id = c.account_id "
        "WHERE c.credential_id = {row}.credential_id)",
        f"{{row}}.state NOT IN {sql_list(DEAD_KEY_STATES)}",
    ),
    Digested("keyvault_servicetoken", "'service'", _VALID_AT_RETIREMENT),
    Digested(
        "keyvault_customertoken",
        "(SELECT a.environment FROM keyvault_account a WHERE a.id = {row}.account_id)",
        _VALID_AT_RETIREMENT,
    ),
)

VERSIONS = (
    WriteGuard(
        "pepperversion_newest",
        _PEPPERS,
        "UPDATE",
        "NEW.retired_at IS NOT NULL AND OLD.retired_at IS NULL "
        "AND NOT EXISTS (SELECT 1 FROM keyvault_pepperversion p WHERE p.pepper_set = NEW.pepper_set "
        "AND p.number > NEW.number AND p.retired_at IS NULL AND p.hashes_from_at <= NEW.retired_at)",
        "a pepper is retired only after a newer one makes the digests",
    ),
    Frozen(
        _PEPPERS,
        ("id", "pepper_set", "number", "check_value", "created_at"),
        "a pepper version is immutable, and its hashes_from_at is set once",
        refused_if=f"({is_changed('hashes_from_at')} "
        "AND (OLD.number = 1 OR OLD.hashes_from_at IS NOT NULL OR OLD.retired_at IS NOT NULL))",
    ),
    WriteGuard(
        "pepperversion_no_revival",
        _PEPPERS,
        "UPDATE",
        f"({set_again('retired_at')}) OR ({set_again('destroyed_at')}) "
        "OR (NEW.destroyed_at IS NOT NULL AND NEW.retired_at IS NULL)",
        "a pepper stays retired or destroyed, and is destroyed only after its retirement",
    ),
)

PEPPERS = (*DIGESTED, *VERSIONS)
