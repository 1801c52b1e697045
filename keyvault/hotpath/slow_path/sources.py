"""Data sources of a step (`access.judgement.Sources`). Missing data raises MissingDataError."""

from collections.abc import Mapping

from keyvault.access.catalog import Endpoint
from keyvault.access.customers import CustomerRecord
from keyvault.access.limits import Bucket, Spend
from keyvault.access.policy_snapshot import PolicySnapshot
from keyvault.access.principals import Service
from keyvault.access.verification import TokenRecord, judge_service_token, read_service_token
from keyvault.domain.digests import PEPPER_SET, Peppers, PepperSet
from keyvault.domain.environments import Environment
from keyvault.domain.errors import VerifierStaleError
from keyvault.domain.keys import KeyRecord
from keyvault.domain.keystring import KEY_ID_PLACE, KeyString
from keyvault.hotpath.engine.engine import Engine
from keyvault.hotpath.engine.memory import CacheEntry
from keyvault.hotpath.messages.pending_requests import (
    CUSTOMER,
    KEY,
    RULES,
    TOKEN,
    Found,
    MissingDataError,
    PendingRequest,
    PendingSpend,
)


class CachedSources:
    """Sources of one judgement: memory while it is fresh, and the data read for this request."""

    def __init__(self, engine: Engine, pending: PendingRequest, may_remember: bool) -> None:
        self.key_prefix = engine.ports.key_prefix
        self.base_urls = engine.ports.base_urls
        self.may_remember = may_remember
        self.now = pending.at
        self.number = 0
        self.token: TokenRecord | None = None
        self._engine = engine
        self._pending = pending

    def peppers(self, environment: Environment) -> Peppers:
        return self._engine.ports.peppers(PEPPER_SET[environment])

    def take_pepper(self, peppers: Peppers, version: int) -> Peppers:
        return self._engine.ports.take_pepper(peppers, version)

    def find_key(self, key_id: str, address: str | None) -> KeyRecord | None:
        found = self._find(KEY, key_id, self._engine.memory.keys.by_id, address)
        return found if isinstance(found, KeyRecord) else None

    def find_customer(self, token_id: str) -> CustomerRecord | None:
        found = self._find(CUSTOMER, token_id, self._engine.memory.customers.by_id)
        return found if isinstance(found, CustomerRecord) else None

    def prove_service(self, presented: str | None) -> Service | None:
        keystring = read_service_token(presented, self.key_prefix)
        if keystring is None:
            return None
        ports = self._engine.ports
        peppers = ports.peppers(PepperSet.SERVICE)
        found = self._find(TOKEN, keystring.key_id, self._engine.memory.tokens.by_id)
        record = found if isinstance(found, TokenRecord) else None
        if record is not None:
            peppers = ports.take_pepper(peppers, record.pepper_version)
        service = judge_service_token(keystring, record, peppers, self.now)
        if service is not None and record is not None:
            self.token = record
            ports.note_token_proof(record, keystring, peppers)
        return service

    def rules(self) -> PolicySnapshot:
        """Return the policy snapshot. Raises MissingDataError, or VerifierStaleError when it could not be read."""
        read, remembered = self._pending.rules, self._engine.rules
        if isinstance(read, Exception):
            raise VerifierStaleError("The rules cannot be read right now. Try again.")
        if read is not None:
            return read
        if remembered is not None and self.may_remember:
            return remembered
        raise MissingDataError(RULES)

    def buckets(self, record: KeyRecord, endpoint: Endpoint) -> tuple[Bucket, ...]:
        limit, setting = self.rules().endpoint_limit(record.account_id, record.environment, endpoint)
        return self._engine.ports.buckets(record, endpoint, limit, setting)

    def spend(self, buckets: tuple[Bucket, ...], cost: int, *, refuse_on_loss: bool) -> Spend:
        budgets = self._engine.ports.budgets
        spent = self._pending.spent.get(self.number)
        if isinstance(spent, Spend):
            return spent
        if isinstance(spent, Exception):
            raise spent
        if budgets.is_local:
            return budgets.spend(buckets, cost, refuse_on_loss=refuse_on_loss)
        raise MissingDataError("spend", spend=PendingSpend(self.number, buckets, cost, refuse_on_loss))

    def note_failed_proof(self, address: str | None) -> int | None:
        return self._engine.ports.note_failed_proof(address)

    def note_proof(self, record: KeyRecord, keystring: KeyString, peppers: Peppers) -> None:
        self._engine.ports.note_key_proof(record, keystring, peppers)

    def _find(
        self,
        kind: str,
        identity: str,
        cache: Mapping[str, CacheEntry[KeyRecord] | CacheEntry[CustomerRecord] | CacheEntry[TokenRecord]],
        address: str | None = None,
    ) -> Found | None:
        """Return the record. Raises MissingDataError, or VerifierStaleError when it could not be read or trusted."""
        if self._engine.freshness.is_lost:
            raise VerifierStaleError(
                "The verifier's database lacks changes that the verifier has seen. "
                "It verifies no key until it is restarted.",
                internal="the change feed went back",
            )
        if (kind, identity) in self._pending.found:
            found = self._pending.found[kind, identity]
            if isinstance(found, Exception):
                raise VerifierStaleError(
                    "The service token cannot be looked up right now."
                    if kind == TOKEN
                    else "The key cannot be looked up right now."
                )
            return found
        if self.may_remember:
            entry = cache.get(identity)
            if entry is not None:
                entry.is_referenced = True
                return entry.record
            if self._engine.memory.absent.has(kind, identity, self._engine.ports.monotonic()):
                return None
        raise MissingDataError(kind, identity, address=address)


def read_for(pending: PendingRequest, text: str | None) -> KeyRecord | None:
    """Return the record of the key that `text` names, if it was read for this request."""
    if text is None or not pending.found:
        return None
    found = pending.found.get((KEY, text[KEY_ID_PLACE]))
    return found if isinstance(found, KeyRecord) else None
