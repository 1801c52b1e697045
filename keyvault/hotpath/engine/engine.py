"""The verification engine: bytes in, bytes out, without a framework and without I/O.

    engine.verify_known(authorization, body) -> HttpResponse | CacheMiss | None   decided from memory
    engine.verify_missed([miss], {key id: record}) -> [HttpResponse | None]       after the key was read

`slow_path` answers every other request.

A cached entry is valid until a change concerns it. Before each decision the engine compares the host's generation
counter and evicts what changed. `evict` applies changes of other hosts. `Freshness` tracks how long ago the feed was
complete. A record whose read overlapped a change serves the request that it was read for, and is not cached.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain, count
from typing import Final, NamedTuple
from urllib.parse import urlsplit
from weakref import WeakSet

from msgspec import UNSET, Raw

from keyvault.access.catalog import Endpoint
from keyvault.access.judgement import Judgement
from keyvault.access.limits import Bucket
from keyvault.access.policy_snapshot import PolicySnapshot
from keyvault.access.principals import Service
from keyvault.access.verification import TokenRecord, find_exposed, read_key
from keyvault.domain.base62 import encode, random_digits
from keyvault.domain.digests import PEPPER_SET
from keyvault.domain.environments import Environment
from keyvault.domain.errors import VerifierStaleError
from keyvault.domain.free_text import MAX_REDACTED_LENGTH, MAX_STORED_LENGTH, clean_text
from keyvault.domain.ids import Subject
from keyvault.domain.keys import DEAD_STATES, KeyKind, KeyRecord, KeyState
from keyvault.domain.keystring import KEY_ID_PLACE, SHAPED, KeyString
from keyvault.hotpath.engine.cached_verdicts import (
    LAST,
    MAX_TEMPLATES,
    TIMES,
    CachedDenial,
    CachedGrant,
    CacheMiss,
    Caller,
    CountedUse,
    EligibleKey,
    GrantTemplate,
    SpendPlan,
    SpendPlans,
    Tally,
)
from keyvault.hotpath.engine.freshness import Freshness
from keyvault.hotpath.engine.memory import RULES, TAG_KEY_BYTES, CacheEntry, Memory, key_entry
from keyvault.hotpath.engine.ports import EngineVerdict, Ports
from keyvault.hotpath.messages.requests import VerifyRequest, decode_plain_verify, decode_verify
from keyvault.hotpath.messages.responses import HttpResponse

_MAX_USES: Final = 20_000
_MAX_ACCOUNTS: Final = 65_536
_MAX_CLEAN_TEXTS: Final = 4_096
_ENVIRONMENTS: Final = {environment.value: environment for environment in Environment}


CacheTarget = tuple[CacheEntry[TokenRecord], bytes]
"""Where to cache a grant: the entry of the proved token, and the tag of the request (`Engine.request_tags`)."""


class VerdictCounts(NamedTuple):
    """Verdicts that the engine counts itself. `from_memory` includes `denied_from_memory`."""

    from_memory: int
    denied_from_memory: int
    granted_after_read: int


class Engine:
    """The engine of one process. Threads share it."""

    def __init__(self, ports: Ports, freshness: Freshness, capacity: int) -> None:
        self.ports = ports
        self.freshness = freshness
        self.base_paths = {env.value: urlsplit(url).path for env, url in ports.base_urls.items()}
        self.memory = Memory(ports.random_bytes(TAG_KEY_BYTES), capacity)
        self.rules: PolicySnapshot | None = None
        self.lock = threading.Lock()
        self.changes = 0
        """Number of evictions. A read that began before an eviction is not cached after it."""
        self.answered_from_memory = 0
        """Verdicts from memory since the last report, with the denials."""
        self.denied_from_memory = 0
        self.granted_after_read = 0
        self._grant_templates: dict[tuple[object, ...], GrantTemplate] = {}
        self._spend_plans: OrderedDict[tuple[object, ...], SpendPlans] = OrderedDict()
        self._all_spend_plans: WeakSet[SpendPlans] = WeakSet()
        """Includes plans of evicted accounts whose keys are still cached."""
        self._uses: dict[CountedUse, Tally] = {}
        self._clean_texts: dict[str, str] = {}
        """Cleaned form of user agents and origins that contain no secret. Thousands of keys share the same few."""
        self._period = 1
        self._generation_memory = ports.generation.memory
        self._seen_generation = ports.generation.since(-1)[0]
        self._new_tag = self.memory.new_tag
        self._keys_by_id = self.memory.keys.by_id
        self._keys_by_tag = self.memory.keys.by_tag
        self._tokens_by_tag = self.memory.tokens.by_tag
        self._granted = self.memory.granted
        self._denied = self.memory.denied
        self._monotonic = ports.monotonic
        self._wall = ports.wall
        self._note_new_use = ports.note_new_use
        self._key_opening = f"{ports.key_prefix}_"
        self._next_id = _request_ids(ports.random_bytes).__next__
        self.verify_known = self._make_verify_known()
        """Answer POST /v1/keys/verify from memory, for a grant or for a denial of a terminated key.

        Takes the whole Authorization header and the body; no other header may affect the result. Returns a CacheMiss
        when only the key is missing; pass it to `verify_missed` once the key was read. Returns None when the slow path
        must decide; nothing was spent or recorded.
        """

    # --- cache and freshness --------------------------------------------------------------------------------------

    def evict(self, subjects: Iterable[Subject] | None) -> None:
        """Evict the entries that depend on these subjects; None evicts everything."""
        with self.lock:
            self._evict(subjects)

    def _evict(self, subjects: Iterable[Subject] | None) -> None:
        self.changes += 1
        if subjects is None:
            self.memory.clear()
            self._forget_rules()
            self._spend_plans.clear()
            return
        subjects = list(subjects)
        self.memory.evict(subjects)
        if any(kind in RULES for kind, _ in subjects):
            self._forget_rules()

    def _forget_rules(self) -> None:
        self.rules = None
        self._grant_templates.clear()
        for spend_plans in list(self._all_spend_plans):
            # Cleared, not dropped: cached keys still reference the plans, and through them the replaced rules.
            spend_plans.by_template.clear()
            spend_plans.by_name.clear()

    def catch_up(self) -> None:
        """Evict what this host changed since the last check. The caller holds the lock.

        If the changes cannot be read, evict everything; nothing is cached until they can be read.
        """
        if self._generation_memory[0] != self._seen_generation:
            try:
                seen, subjects = self.ports.generation.since(self._seen_generation)
            except OSError:
                self._evict(None)
                return
            # Evict before publishing the counter: a thread that sees the current counter may answer.
            self._evict(subjects)
            self._generation_memory = self.ports.generation.memory
            self._seen_generation = seen

    def may_remember(self) -> bool:
        """Return whether memory may be used now. The caller holds the lock and has called `catch_up`."""
        has_caught_up = self._generation_memory[0] == self._seen_generation
        return has_caught_up and self.freshness.is_fresh(self.ports.monotonic(), self.ports.wall())

    # --- fast path ------------------------------------------------------------------------------------------------

    def _make_verify_known(self) -> Callable[[bytes, bytes], HttpResponse | CacheMiss | None]:
        """Build `verify_known`, which answers nearly all requests.

        A closure binds the constant objects once, and `Freshness.is_fresh` is inlined.
        """
        acquire, release = self.lock.acquire, self.lock.release  # `with` takes twice as long
        wall_clock, monotonic_clock, freshness = self.ports.wall, self.ports.monotonic, self.freshness
        new_tag, next_id, find_granted, grant = self._new_tag, self._next_id, self._granted.get, self._grant

        def verify_known(authorization: bytes, body: bytes) -> HttpResponse | CacheMiss | None:
            acquire()
            try:
                wall, monotonic = wall_clock(), monotonic_clock()
                if self._generation_memory[0] != self._seen_generation:
                    self.catch_up()
                    if not self.may_remember():
                        return None
                until, least, most = freshness.fresh_window
                if monotonic >= until or not least < wall - monotonic < most:
                    return None
                mac = new_tag()
                mac.update(b"\n".join((authorization, body)))
                tag = mac.digest()
                request_id = next_id()
                cached = find_granted(tag)
                if cached is not None and (text := grant(cached, wall, request_id)) is not None:
                    self.answered_from_memory += 1
                    return HttpResponse(200, text, request_id.decode())
                denied = self._denied.get(tag)
                if denied is None or not self._is_denial_valid(denied, wall):
                    return self._verify_anew(authorization, body, tag, wall, request_id)
                self.answered_from_memory += 1
                self.denied_from_memory += 1
            finally:
                release()
            # Outside the lock: writing the log must not block other threads.
            at = datetime.fromtimestamp(wall, UTC)
            self.ports.note_verdict(replace(denied.verdict, request_id=request_id.decode(), at=at, is_from_memory=True))
            return HttpResponse(200, denied.text % (request_id, request_id), request_id.decode())

        return verify_known

    def _verify_anew(
        self, authorization: bytes, body: bytes, tag: bytes, wall: float, request_id: bytes
    ) -> HttpResponse | CacheMiss | None:
        """Decide from the cached token and key. `tag` identifies the whole request."""
        mac = self._new_tag()
        mac.update(authorization)
        token = self._tokens_by_tag.get(mac.digest())
        if token is None or wall >= token.deadline:
            return None
        request, is_plain = decode_plain_verify(body), True
        if request is None:
            request, is_plain = decode_verify(body), False
            if request is None or _needs_slow_path(request):
                return None
        entry = self._find(request.key, request.environment)
        if isinstance(entry, KeyString):
            return CacheMiss(request, token.derived, entry, request_id, self.changes, is_plain)
        if entry is None:
            return None
        text = self._decide(
            request, token.derived, wall, request_id, entry, is_plain=is_plain, cache_target=(token, tag)
        )
        if text is None:
            return None
        self.answered_from_memory += 1
        return HttpResponse(200, text, request_id.decode())

    def verify_missed(self, misses: Sequence[CacheMiss], found: Mapping[str, KeyRecord]) -> list[HttpResponse | None]:
        """Answer cache misses with the records that were found.

        None for a request that the slow path must decide: something changed since it arrived, or it is not a plain
        grant.
        """
        with self.lock:
            self.catch_up()
            if not self.may_remember():
                return [None] * len(misses)
            wall = self._wall()
            return [self._verify_missed(miss, found.get(miss.keystring.key_id), wall) for miss in misses]

    def _verify_missed(self, miss: CacheMiss, record: KeyRecord | None, wall: float) -> HttpResponse | None:
        if self.changes != miss.changes:
            return None
        if record is None:
            self.memory.absent.put("key", miss.keystring.key_id, self._monotonic())
            return None
        entry = self._keys_by_id.get(record.key_id)
        if entry is None or entry.record is not record:  # several requests missed the same key
            entry = self.memory.admit_key(record)
        if not self._proves(miss.keystring, entry, miss.request.key):
            return None
        request_id = miss.request_id
        text = self._decide(miss.request, miss.caller, wall, request_id, entry, is_plain=miss.is_plain)
        if text is None:
            return None
        self.granted_after_read += 1
        return HttpResponse(200, text, request_id.decode())

    def decide_known(
        self,
        request: VerifyRequest,
        caller: Caller,
        wall: float,
        request_id: bytes,
        record: KeyRecord | None = None,
        cache_target: CacheTarget | None = None,
    ) -> bytes | None:
        """Spend and record a grant, and return it as JSON. None when the slow path must decide: nothing was spent.

        Args:
            record: The record read for this request. Without it the key is looked up in memory, which must be fresh.
            cache_target: Where to cache the grant for repetitions, see `CachedGrant`.
        """
        entry = None if _needs_slow_path(request) else self._find(request.key, request.environment, record)
        if not isinstance(entry, CacheEntry):
            return None
        return self._decide(
            request, caller, wall, request_id, entry, cache_target=cache_target if record is None else None
        )

    def _decide(
        self,
        request: VerifyRequest,
        caller: Caller,
        wall: float,
        request_id: bytes,
        entry: CacheEntry[KeyRecord],
        *,
        is_plain: bool = False,
        cache_target: CacheTarget | None = None,
    ) -> bytes | None:
        """Implement `decide_known` for a proved key. `is_plain`: the request came from `requests.decode_plain_verify`.

        Runs under the lock, so that a use is never recorded with a time before a report that omits it. Helpers are
        inlined, since a call costs as much as its body.
        """
        name, rules, agent = request.endpoint, self.rules, request.user_agent
        cost, origin = 1, ""
        if not is_plain:
            cost, origin = request.cost or 1, request.origin or ""
            is_plain = (
                name is not UNSET and request.origin is UNSET and request.merchant is UNSET and request.store is UNSET
            )
        clean_agent = self._clean_texts.get(agent) if agent else ""
        if (agent and clean_agent is None and self._key_opening in agent) or (origin and self._key_opening in origin):
            return None  # a text that may contain a key is stored masked only
        eligible: EligibleKey | None = entry.derived
        if (
            eligible is None
            or rules is None
            or wall >= entry.deadline
            or eligible.environment != request.environment
            or eligible.environment not in caller.environments
            or (caller.merchants is not None and eligible.merchant not in caller.merchants)
            or (eligible.within is not None and not eligible.is_from_network(request.client_ip))
        ):
            return None
        spend_plan = eligible.spend_plans.by_name.get(name) if is_plain else None
        if spend_plan is None or spend_plan.rules is not rules:
            spend_plan = self._spend_plan(request, entry.record, eligible, rules)
            if spend_plan is None:
                return None
            if is_plain:
                eligible.spend_plans.by_name[name] = spend_plan
        if cost > spend_plan.max_cost:
            return None
        balances = spend_plan.spend(cost)
        if balances is None:
            return None
        clean_agent = self._clean_text(agent) if agent and clean_agent is None else clean_agent or ""
        origin = self._clean_text(origin) if origin and eligible.kind is KeyKind.PUBLIC else ""
        use = (entry.identity, spend_plan.name, request.client_ip or caller.source, clean_agent, origin, caller.outcome)
        tally = self._uses.get(use) or self._tally(use, wall)
        tally[TIMES] += 1
        tally[LAST] = wall
        if cache_target is not None:
            token, tag = cache_target
            if self.memory.has_room_for(tag):
                self.memory.cache_grant(tag, CachedGrant(token, entry, spend_plan, cost, use))
        return spend_plan.template.fill(balances, request_id, eligible.identity)

    def request_tags(self, authorization: bytes, bodies: Iterable[bytes | Raw]) -> list[bytes]:
        """Return the tag of each body as sent by this caller.

        A header has no line break, so the tags of different callers differ.
        """
        keyed = self._new_tag()
        keyed.update(authorization + b"\n")
        tags = []
        for body in bodies:
            mac = keyed.copy()
            mac.update(body)
            tags.append(mac.digest())
        return tags

    def decide_cached(self, tags: Sequence[bytes], wall: float, request_id: bytes) -> dict[int, bytes]:
        """Return cached grants of a batch by position. The caller holds the lock, and memory is fresh.

        Empty, with nothing spent, unless every request of the batch is cached: a malformed one rejects the batch.
        """
        granted = [self._granted.get(tag) for tag in tags]
        if None in granted:
            return {}
        decided: dict[int, bytes] = {}
        for number, cached in enumerate(granted):
            text = self._grant(cached, wall, b"%b-%d" % (request_id, number))  # type: ignore[arg-type]  # checked above
            if text is not None:
                decided[number] = text
        self.answered_from_memory += len(decided)
        return decided

    def _grant(self, cached: CachedGrant, wall: float, request_id: bytes) -> bytes | None:
        """Spend and record the grant, and return it as JSON. None when it must be decided anew: nothing was spent."""
        entry, spend_plan = cached.entry, cached.spend_plan
        if wall >= entry.deadline or wall >= cached.token.deadline or spend_plan.rules is not self.rules:
            return None
        balances = spend_plan.spend(cached.cost)
        if balances is None:
            return None
        entry.is_referenced = True
        if cached.period != self._period:
            self._open_tally(cached, wall)
        tally = cached.tally
        tally[TIMES] += 1
        tally[LAST] = wall
        if spend_plan.is_single:  # `fill` inlined
            remaining, reset = balances
            return spend_plan.text % (remaining, reset, request_id, cached.identity, remaining, reset)
        return spend_plan.template.fill(balances, request_id, cached.identity)

    def _is_denial_valid(self, denied: CachedDenial, wall: float) -> bool:
        """Return whether all that the denial depends on is still cached, and the key can still be proved."""
        entry = denied.entry
        if wall >= entry.deadline or wall >= denied.token.deadline or denied.rules is not self.rules:
            return False
        entry.is_referenced = True
        try:
            peppers = self.ports.loaded_peppers(PEPPER_SET[entry.record.environment])
        except VerifierStaleError:
            return False
        return entry.record.pepper_version in peppers.versions

    def _clean_text(self, text: str) -> str:
        """Return the cleaned text from cache. Callers have excluded texts that may contain a key."""
        read = text[:MAX_REDACTED_LENGTH]
        kept = self._clean_texts.get(read)
        if kept is not None:
            return kept
        cleaned = clean_text(read, MAX_REDACTED_LENGTH)
        kept = cleaned[:MAX_STORED_LENGTH]
        if cleaned == read:
            if len(self._clean_texts) >= _MAX_CLEAN_TEXTS:
                self._clean_texts.clear()
            self._clean_texts[read] = kept
        return kept

    def _tally(self, use: CountedUse, wall: float) -> Tally:
        uses = self._uses
        tally = uses.get(use)
        if tally is None and len(uses) >= _MAX_USES:
            # Drop the source until the next report; the count stays exact.
            use = (use[0], use[1], "", "", "", use[5])
            tally = uses.get(use)
        if tally is None:
            tally = uses[use] = [*use, 0, wall, wall]
            self._note_new_use(*use, wall)
        return tally

    def _open_tally(self, cached: CachedGrant, wall: float) -> None:
        cached.period, cached.tally = self._period, self._tally(cached.use, wall)

    def _find(
        self, text: str | None, environment: str, record: KeyRecord | None = None
    ) -> CacheEntry[KeyRecord] | KeyString | None:
        """Return the cached entry that this string proves, or the entry of `record` if given.

        A KeyString: the key is not cached. None: the slow path must decide.
        """
        if text is None:
            return None
        if record is None and text[KEY_ID_PLACE] in self._keys_by_id:
            mac = self._new_tag()
            try:
                mac.update(text.encode())
            except UnicodeEncodeError:  # half a surrogate pair; no key contains one
                return None
            entry = self._keys_by_tag.get(mac.digest())
            if entry is not None:
                entry.is_referenced = True  # only entries that are used again survive eviction
                return entry
        keystring = read_key(
            text,
            environment=_ENVIRONMENTS[environment],
            key_prefix=self.ports.key_prefix,
            base_urls=self.ports.base_urls,
        )
        if not isinstance(keystring, KeyString):
            return None
        entry = self._keys_by_id.get(keystring.key_id)
        if record is not None and (entry is None or entry.record is not record):
            entry = key_entry(record)
        if entry is None:
            absent = self.memory.absent
            if absent.until and absent.has("key", keystring.key_id, self._monotonic()):
                return None
            return keystring
        if not self._proves(keystring, entry, text):
            return None
        if record is None:
            entry.is_referenced = True
        return entry

    def _proves(self, keystring: KeyString, entry: CacheEntry[KeyRecord], text: str | None) -> bool:
        """Return whether the string is the key's. If so, bind a cached entry to the tag of `text`."""
        record, ports = entry.record, self.ports
        version = record.pepper_version
        try:
            peppers = ports.loaded_peppers(PEPPER_SET[record.environment])
            if version not in peppers.versions:
                peppers = ports.take_pepper(peppers, version)
        except VerifierStaleError:
            return False
        if not peppers.matches(keystring.text, record.digest, version):
            return False
        if version < peppers.current_version and record.state not in DEAD_STATES:
            ports.note_key_proof(record, keystring, peppers)
        entry.derived = self._eligible_key(record)
        if text is not None and self._keys_by_id.get(entry.identity) is entry:
            self.memory.keys.bind(entry, self.memory.tag(text.encode()))
        return True

    def _eligible_key(self, record: KeyRecord) -> EligibleKey | None:
        """Return the fast-path data of a plain key; None for any other key."""
        if not record.merchant_active or not record.account_active or record.state is not KeyState.ACTIVE:
            return None
        account = (
            record.account_id,
            record.account_version,
            record.limit_count,
            record.limit_seconds,
            record.kind,
            record.merchant_id,
            record.environment,
        )
        spend_plans = self._spend_plans.get(account)
        if spend_plans is None:
            if len(self._spend_plans) >= _MAX_ACCOUNTS:
                self._spend_plans.popitem(last=False)
            spend_plans = self._spend_plans[account] = SpendPlans(record)
            self._all_spend_plans.add(spend_plans)
        identity = spend_plans.identity % (record.key_id.encode(), record.credential_id.encode())
        within: dict[str, bool] | None = {} if record.networks else None
        return EligibleKey(
            record.environment, identity, record.kind, record.merchant_id, record.networks, spend_plans, within
        )

    def _spend_plan(
        self, request: VerifyRequest, record: KeyRecord, eligible: EligibleKey, rules: PolicySnapshot
    ) -> SpendPlan | None:
        template_key = self._template_key(request, eligible, rules)
        grant_template = None if template_key is None else self._grant_templates.get(template_key)
        if grant_template is None or grant_template.rules is not rules:
            return None
        spend_plan = eligible.spend_plans.by_template.get(grant_template)
        if spend_plan is None:
            buckets: tuple[Bucket, ...] = ()
            if grant_template.endpoint.spends:
                limit, setting = rules.endpoint_limit(record.account_id, record.environment, grant_template.endpoint)
                buckets = self.ports.buckets(record, grant_template.endpoint, limit, setting)
            if len(eligible.spend_plans.by_template) >= MAX_TEMPLATES:
                eligible.spend_plans.by_template.clear()
            spend_plan = eligible.spend_plans.by_template[grant_template] = SpendPlan(
                grant_template, buckets, self.ports.budgets
            )
        return spend_plan

    def learn(self, request: VerifyRequest, judgement: Judgement, endpoint: Endpoint, rules: PolicySnapshot) -> None:
        """Store a grant of the slow path as the template for later requests. The caller holds the lock."""
        record = judgement.record
        if record is None or judgement.customer is not None or rules is not self.rules:
            return
        eligible = self._eligible_key(record)
        template_key = None if eligible is None else self._template_key(request, eligible, rules)
        if template_key is None:
            return
        grant_template = self._grant_templates.get(template_key)
        if grant_template is not None and grant_template.rules is rules:
            return  # unchanged; spend plans are keyed by this object
        if len(self._grant_templates) >= MAX_TEMPLATES:
            self._grant_templates.clear()
        self._grant_templates[template_key] = GrantTemplate(judgement, endpoint, rules)

    def learn_denial(
        self, verdict: EngineVerdict, authorization: bytes, body: bytes, proved: TokenRecord, rules: PolicySnapshot
    ) -> None:
        """Cache a final denial of the slow path, for a terminated key. The caller holds the lock."""
        record = verdict.judgement.record
        if record is None or record.state not in DEAD_STATES or rules is not self.rules:
            return
        entry = self.memory.keys.by_id.get(record.key_id)
        token = self.memory.tokens.by_id.get(proved.service.token_id)
        if entry is None or entry.record is not record or token is None or token.record is not proved:
            return
        context = f"{verdict.user_agent} {verdict.source} {verdict.origin}"
        if self._key_opening in context or SHAPED.search(context) is not None:
            return  # a text that may contain a key is stored masked only
        (tag,) = self.request_tags(authorization, [body])
        self.memory.cache_denial(tag, CachedDenial(token, entry, rules, verdict))

    def _template_key(
        self, request: VerifyRequest, eligible: EligibleKey, rules: PolicySnapshot
    ) -> tuple[object, ...] | None:
        """Return the parts of a request that decide its template.

        None for what is judged each time: a private key with an origin, a merchant other than the key's, a key in the
        path.
        """
        has_origin = request.origin is not UNSET and request.origin is not None
        merchant, store, name = request.merchant or None, request.store or None, request.endpoint
        if has_origin and eligible.kind is KeyKind.PRIVATE:
            return None
        if merchant is not None and merchant != eligible.merchant:
            return None
        context = merchant
        if name is UNSET:
            path = request.path or ""
            if find_exposed(path) is not None:
                return None
            base = self.base_paths[request.environment]
            endpoint = rules.catalog.match(request.method or "", path, base)
            if not isinstance(endpoint, Endpoint):
                return None
            name = endpoint.name
            context, store = endpoint.read_contexts(path, {}, merchant, store)
            if context is not None and context != eligible.merchant:
                return None
        elif store is not None:
            store = store.strip() or None
        return (
            request.environment,
            name,
            eligible.kind,
            has_origin,
            merchant is not None,
            context is not None,
            store is not None,
        )

    def caller(self, service: Service) -> Caller:
        return Caller(service, self.ports.environments, self.ports.outcome(service.is_probe))

    # --- evidence -----------------------------------------------------------------------------------------------

    def take_uses(self) -> tuple[Collection[Tally], VerdictCounts]:
        """Return and reset the recorded uses and the numbers of verdicts.

        Every use recorded before the call is in this result or in an earlier one.
        """
        with self.lock:
            uses, self._uses = self._uses, {}
            self._period += 1
            counts = VerdictCounts(self.answered_from_memory, self.denied_from_memory, self.granted_after_read)
            self.answered_from_memory = self.denied_from_memory = self.granted_after_read = 0
        return uses.values(), counts


def _needs_slow_path(request: VerifyRequest) -> bool:
    """Return whether the request involves a customer token or is a dry run."""
    return request.customer_token not in (UNSET, None) or request.dry_run is True


def _request_ids(random_bytes: Callable[[int], bytes]) -> Iterator[bytes]:
    """Yield ids in the form of `mint_request_id`: a random prefix, unique to the process, and a counter."""
    front = random_digits(_ID_DIGITS - _COUNTED, random_bytes)
    blocks = (f"{front}{encode(high, _COUNTED - 2)}".encode() for high in count())
    return chain.from_iterable(map(block.__add__, _PAIRS) for block in blocks)


_ID_DIGITS, _COUNTED = 22, 9
_PAIRS = [encode(number, 2).encode() for number in range(62**2)]
