"""The verification engine: bytes in, bytes out, without a framework and without I/O.

    engine.verify_known(authorization, body) -> HttpResponse | CacheMiss | None   decided from memory
    engine.verify_missed([miss], {key id: record}) -> [HttpResponse | None]       after the key was read

`slow_path` answers every other request.

A cached entry is valid until a change concerns it. Before each decision the engine compares the host's generation
counter and evicts what changed. `evict` applies changes of other hosts. `Freshness` tracks how long ago the feed
was complete. A record whose read overlapped a change serves the request that it was read for, and is not cached.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain, count
from typing import Final
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
from keyvault.domain.free_text import READ_AT_MOST, WORDS_KEPT, clean_text
from keyvault.domain.keys import DEAD_STATES, KeyKind, KeyRecord, KeyState
from keyvault.domain.keystring import KEY_ID_PLACE, SHAPED, KeyString
from keyvault.hotpath.engine.cached_verdicts import (
    LAST,
    MOST_WAYS,
    TIMES,
    CachedDenial,
    CachedGrant,
    CacheMiss,
    Caller,
    EligibleKey,
    GrantTemplate,
    SpendPlan,
    SpendPlans,
    Tally,
    Use,
)
from keyvault.hotpath.engine.freshness import Freshness
from keyvault.hotpath.engine.memory import RULES, CacheEntry, Memory, Subject, known_key
from keyvault.hotpath.engine.ports import EngineVerdict, Ports
from keyvault.hotpath.messages.requests import VerifyRequest, read_asked, read_plain
from keyvault.hotpath.messages.responses import HttpResponse

_MOST_USES: Final = 20_000
_MOST_ACCOUNTS: Final = 65_536
_MOST_CLEAN: Final = 4_096
_ENVIRONMENTS: Final = {environment.value: environment for environment in Environment}


Asker = tuple[CacheEntry[TokenRecord], bytes]
"""Where a grant is cached: entry of the proved token, and tag of the question (`Engine.question_tags`)."""


class Engine:
    """The engine of one process. Threads share it."""

    def __init__(self, ports: Ports, freshness: Freshness, capacity: int) -> None:
        self.ports = ports
        self.freshness = freshness
        self.base_paths = {env.value: urlsplit(url).path for env, url in ports.base_urls.items()}
        self.memory = Memory(ports.random_bytes(32), capacity)
        self.rules: PolicySnapshot | None = None
        self.lock = threading.Lock()
        self.changes = 0
        """Number of evictions. A read that began before an eviction is not cached after it."""
        self.answered_from_memory = 0
        self._ways: dict[tuple[object, ...], GrantTemplate] = {}
        self._purses: OrderedDict[tuple[object, ...], SpendPlans] = OrderedDict()
        self._all_purses: WeakSet[SpendPlans] = WeakSet()
        """Includes plans of evicted accounts whose keys are still cached."""
        self._uses: dict[Use, Tally] = {}
        self._clean: dict[str, str] = {}
        """Cleaned form of user agents and origins that contain no secret. Thousands of keys share the same few texts.
        """
        self._period = 1
        self._words = ports.generation.words
        self._seen = ports.generation.since(-1)[0]
        self._new_tag = self.memory.new_tag
        self._keys_by_id = self.memory.keys.by_id
        self._keys_by_tag = self.memory.keys.by_tag
        self._tokens_by_tag = self.memory.tokens.by_tag
        self._repeats = self.memory.repeats
        self._denied = self.memory.denied
        self._monotonic = ports.monotonic
        self._wall = ports.wall
        self._mark = f"{ports.brand}_"
        self._next_id = _request_ids(ports.random_bytes).__next__
        self.verify_known = self._make_verify_known()
        """Answer POST /v1/keys/verify from memory, for a grant or for a denial of a terminated key.

        Args: the whole Authorization header, and the body. No other header of the request may make a difference.
        Returns: the response. A CacheMiss when only the key is missing; pass it to `verify_missed` once the key was
        read.
        None when the slow path must decide; nothing was spent or recorded.
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
            self._purses.clear()
            return
        subjects = list(subjects)
        self.memory.evict(subjects)
        if any(kind in RULES for kind, _ in subjects):
            self._forget_rules()

    def _forget_rules(self) -> None:
        self.rules = None
        self._ways.clear()
        for purses in list(self._all_purses):
            # Cleared, not dropped: cached keys still reference the plans, and through them the replaced rules.
            purses.by_way.clear()
            purses.by_name.clear()

    def catch_up(self) -> None:
        """Evict what this host changed since the last check. The caller holds the lock.

        If the changes cannot be read, evict everything; nothing is cached until they can be read.
        """
        if self._words[0] != self._seen:
            try:
                seen, subjects = self.ports.generation.since(self._seen)
            except OSError:
                self._evict(None)
                return
            # Evict before publishing the counter: a thread that sees the current counter may answer.
            self._evict(subjects)
            self._words = self.ports.generation.words
            self._seen = seen

    def may_remember(self) -> bool:
        """Return whether memory may be used now. The caller holds the lock and has called `catch_up`."""
        has_caught_up = self._words[0] == self._seen
        return has_caught_up and self.freshness.may_vouch(self.ports.monotonic(), self.ports.wall())

    # --- fast path ------------------------------------------------------------------------------------------------

    def _make_verify_known(self) -> Callable[[bytes, bytes], HttpResponse | CacheMiss | None]:
        """Build `verify_known`, which answers nearly all requests.

        A closure binds the constant objects once, and `Freshness.is_fresh` is inlined.
        """
        acquire, release = self.lock.acquire, self.lock.release  # `with` takes twice as long
        wall_clock, monotonic_clock, freshness = self.ports.wall, self.ports.monotonic, self.freshness
        new_tag, next_id, find_repeat, grant = self._new_tag, self._next_id, self._repeats.get, self._grant

        def verify_known(authorization: bytes, body: bytes) -> HttpResponse | CacheMiss | None:
            acquire()
            try:
                wall, monotonic = wall_clock(), monotonic_clock()
                if self._words[0] != self._seen:
                    self.catch_up()
                    if not self.may_remember():
                        return None
                until, least, most = freshness.vouched
                if monotonic >= until or not least < wall - monotonic < most:
                    return None
                made = new_tag()
                made.update(b"\n".join((authorization, body)))
                tag = made.digest()
                request_id = next_id()
                repeat = find_repeat(tag)
                if repeat is not None and (text := grant(repeat, wall, request_id)) is not None:
                    self.answered_from_memory += 1
                    return HttpResponse(200, text, request_id.decode())
                denied = self._denied.get(tag)
                if denied is None or not self._is_denied_still(denied, wall):
                    return self._verify_anew(authorization, body, tag, wall, request_id)
                self.answered_from_memory += 1
            finally:
                release()
            # Outside the lock: writing the log must not block other threads.
            at = datetime.fromtimestamp(wall, UTC)
            self.ports.note_verdict(replace(denied.verdict, request_id=request_id.decode(), at=at))
            return HttpResponse(200, denied.text % (request_id, request_id), request_id.decode())

        return verify_known

    def _verify_anew(
        self, authorization: bytes, body: bytes, tag: bytes, wall: float, request_id: bytes
    ) -> HttpResponse | CacheMiss | None:
        """Decide from the cached token and key. `tag` identifies the whole request."""
        made = self._new_tag()
        made.update(authorization)
        token = self._tokens_by_tag.get(made.digest())
        if token is None or wall >= token.deadline:
            return None
        asked, is_plain = read_plain(body), True
        if asked is None:
            asked, is_plain = read_asked(body), False
            if asked is None or _is_of_more(asked):
                return None
        known = self._find(asked.key, asked.environment)
        if isinstance(known, KeyString):
            return CacheMiss(asked, token.about, known, request_id, self.changes, is_plain)
        if known is None:
            return None
        text = self._decide(asked, token.about, wall, request_id, known, is_plain=is_plain, asker=(token, tag))
        if text is None:
            return None
        self.answered_from_memory += 1
        return HttpResponse(200, text, request_id.decode())

    def verify_missed(self, several: Sequence[CacheMiss], found: Mapping[str, KeyRecord]) -> list[HttpResponse | None]:
        """Answer cache misses with the records that were found.

        None for a request that the slow path must decide: something changed since it arrived, or it is not a plain
        grant.
        """
        with self.lock:
            self.catch_up()
            if not self.may_remember():
                return [None] * len(several)
            wall = self._wall()
            return [self._verify_missed(missed, found.get(missed.keystring.key_id), wall) for missed in several]

    def _verify_missed(self, missed: CacheMiss, record: KeyRecord | None, wall: float) -> HttpResponse | None:
        if self.changes != missed.changes:
            return None
        if record is None:
            self.memory.absent.put("key", missed.keystring.key_id, self._monotonic())
            return None
        known = self._keys_by_id.get(record.key_id)
        if known is None or known.record is not record:  # several requests missed the same key
            known = self.memory.admit_key(record)
        if not self._proves(missed.keystring, known, missed.asked.key):
            return None
        request_id = missed.request_id
        text = self._decide(missed.asked, missed.caller, wall, request_id, known, is_plain=missed.is_plain)
        return None if text is None else HttpResponse(200, text, request_id.decode())

    def decide_known(
        self,
        asked: VerifyRequest,
        caller: Caller,
        wall: float,
        request_id: bytes,
        record: KeyRecord | None = None,
        asker: Asker | None = None,
    ) -> bytes | None:
        """Return a grant as JSON, spent and recorded. None when the slow path must decide; nothing was spent or
        recorded.

        Args:
            record: The record read for this request. Without it the key is looked up in memory, which must be fresh.
            cache_target: Where to cache the grant for repetitions, see `CachedGrant`.
        """
        known = None if _is_of_more(asked) else self._find(asked.key, asked.environment, record)
        if not isinstance(known, CacheEntry):
            return None
        return self._decide(asked, caller, wall, request_id, known, asker=asker if record is None else None)

    def _decide(
        self,
        asked: VerifyRequest,
        caller: Caller,
        wall: float,
        request_id: bytes,
        known: CacheEntry[KeyRecord],
        *,
        is_plain: bool = False,
        asker: Asker | None = None,
    ) -> bytes | None:
        """Implement `decide_known` for a proved key. `is_plain`: the request came from `requests.decode_plain_verify`.

        Runs under the lock, so that a use is never recorded with a time before a report that omits it. Helpers are
        inlined, since a call costs as much as its body.
        """
        name, rules, agent = asked.endpoint, self.rules, asked.user_agent
        cost, origin = 1, ""
        if not is_plain:
            cost, origin = asked.cost or 1, asked.origin or ""
            is_plain = name is not UNSET and asked.origin is UNSET and asked.merchant is UNSET and asked.store is UNSET
        words = self._clean.get(agent) if agent else ""
        if (agent and words is None and self._mark in agent) or (origin and self._mark in origin):
            return None  # a text that may contain a key is stored masked only
        holding: EligibleKey | None = known.about
        if (
            holding is None
            or rules is None
            or wall >= known.deadline
            or holding.environment != asked.environment
            or holding.environment not in caller.environments
            or (caller.merchants is not None and holding.merchant not in caller.merchants)
            or (holding.within is not None and not holding.is_from_network(asked.client_ip))
        ):
            return None
        purse = holding.purses.by_name.get(name) if is_plain else None
        if purse is None or purse.rules is not rules:
            purse = self._purse(asked, known.record, holding, rules)
            if purse is None:
                return None
            if is_plain:
                holding.purses.by_name[name] = purse
        if cost > purse.most:
            return None
        standing = purse.pay(cost)
        if standing is None:
            return None
        words = self._cleaned(agent) if agent and words is None else words or ""
        origin = self._cleaned(origin) if origin and holding.kind is KeyKind.PUBLIC else ""
        use = (known.identity, purse.name, asked.client_ip or caller.source, words, origin, caller.outcome)
        tally = self._uses.get(use) or self._tally(use, wall)
        tally[TIMES] += 1
        tally[LAST] = wall
        if asker is not None:
            token, tag = asker
            if self.memory.has_room_for(tag):
                self.memory.remember_question(tag, CachedGrant(token, known, purse, cost, use))
        return purse.template.fill(standing, request_id, holding.identity)

    def question_tags(self, authorization: bytes, bodies: Iterable[bytes | Raw]) -> list[bytes]:
        """Return the tag of each body as sent by this caller. A header has no line break, so tags of different callers
        differ."""
        begun = self._new_tag()
        begun.update(authorization + b"\n")
        tags = []
        for body in bodies:
            made = begun.copy()
            made.update(body)
            tags.append(made.digest())
        return tags

    def decide_again(self, tags: Sequence[bytes], wall: float, request_id: bytes) -> dict[int, bytes]:
        """Return cached grants of a batch by position. The caller holds the lock, and memory is fresh.

        Empty, with nothing spent, unless every request of the batch is cached: a malformed one rejects the batch.
        """
        repeats = [self._repeats.get(tag) for tag in tags]
        if None in repeats:
            return {}
        decided: dict[int, bytes] = {}
        for number, repeat in enumerate(repeats):
            text = self._grant(repeat, wall, b"%b-%d" % (request_id, number))  # type: ignore[arg-type]  # checked above
            if text is not None:
                decided[number] = text
        self.answered_from_memory += len(decided)
        return decided

    def _grant(self, repeat: CachedGrant, wall: float, request_id: bytes) -> bytes | None:
        """Return the grant's JSON, spent and recorded. None when it must be decided anew; nothing was spent or
        recorded."""
        known, purse = repeat.known, repeat.purse
        if wall >= known.deadline or wall >= repeat.token.deadline or purse.rules is not self.rules:
            return None
        standing = purse.pay(repeat.cost)
        if standing is None:
            return None
        known.is_asked_for = True
        if repeat.period != self._period:
            self._open_tally(repeat, wall)
        tally = repeat.tally
        tally[TIMES] += 1
        tally[LAST] = wall
        if purse.is_single:  # `fill` inlined
            remaining, reset = standing
            return purse.text % (remaining, reset, request_id, repeat.identity, remaining, reset)
        return purse.template.fill(standing, request_id, repeat.identity)

    def _is_denied_still(self, denied: CachedDenial, wall: float) -> bool:
        """Return whether all that the denial depends on is still cached, and the key can still be proved."""
        known = denied.known
        if wall >= known.deadline or wall >= denied.token.deadline or denied.rules is not self.rules:
            return False
        known.is_asked_for = True
        try:
            peppers = self.ports.loaded_peppers(PEPPER_SET[known.record.environment])
        except VerifierStaleError:
            return False
        return known.record.pepper_version in peppers.versions

    def _cleaned(self, text: str) -> str:
        """Return the cleaned text from cache. Callers have excluded texts that may contain a key."""
        read = text[:READ_AT_MOST]
        kept = self._clean.get(read)
        if kept is not None:
            return kept
        cleaned = clean_text(read, READ_AT_MOST)
        kept = cleaned[:WORDS_KEPT]
        if cleaned == read:
            if len(self._clean) >= _MOST_CLEAN:
                self._clean.clear()
            self._clean[read] = kept
        return kept

    def _tally(self, use: Use, wall: float) -> Tally:
        uses = self._uses
        tally = uses.get(use)
        if tally is None and len(uses) >= _MOST_USES:
            # Drop the source until the next report; the count stays exact.
            use = (use[0], use[1], "", "", "", use[5])
            tally = uses.get(use)
        if tally is None:
            tally = uses[use] = [*use, 0, wall, wall]
        return tally

    def _open_tally(self, repeat: CachedGrant, wall: float) -> None:
        repeat.period, repeat.tally = self._period, self._tally(repeat.use, wall)

    def _find(
        self, text: str | None, environment: str, record: KeyRecord | None = None
    ) -> CacheEntry[KeyRecord] | KeyString | None:
        """Return the cached entry that this string proves, or the entry of `record` if given.

        A KeyString: the key is not cached. None: the slow path must decide.
        """
        if text is None:
            return None
        if record is None and text[KEY_ID_PLACE] in self._keys_by_id:
            try:
                known = self._keys_by_tag.get(self.memory.tag(text.encode()))
            except UnicodeEncodeError:  # half a surrogate pair; no key contains one
                return None
            if known is not None:
                known.is_asked_for = True  # only entries that are used again survive eviction
                return known
        keystring = read_key(
            text, environment=_ENVIRONMENTS[environment], brand=self.ports.brand, base_urls=self.ports.base_urls
        )
        if not isinstance(keystring, KeyString):
            return None
        known = self._keys_by_id.get(keystring.key_id)
        if record is not None and (known is None or known.record is not record):
            known = known_key(record)
        if known is None:
            absent = self.memory.absent
            if absent.until and absent.has("key", keystring.key_id, self._monotonic()):
                return None
            return keystring
        if not self._proves(keystring, known, text):
            return None
        if record is None:
            known.is_asked_for = True
        return known

    def _proves(self, keystring: KeyString, known: CacheEntry[KeyRecord], text: str | None) -> bool:
        """Return whether the string is the key's. If so, bind a cached entry to the tag of `text`."""
        record, ports = known.record, self.ports
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
        known.about = self._holding(record)
        if text is not None and self._keys_by_id.get(known.identity) is known:
            self.memory.keys.bind(known, self.memory.tag(text.encode()))
        return True

    def _holding(self, record: KeyRecord) -> EligibleKey | None:
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
        purses = self._purses.get(account)
        if purses is None:
            if len(self._purses) >= _MOST_ACCOUNTS:
                self._purses.popitem(last=False)
            purses = self._purses[account] = SpendPlans(record)
            self._all_purses.add(purses)
        identity = purses.identity % (record.key_id.encode(), record.credential_id.encode())
        within: dict[str, bool] | None = {} if record.networks else None
        return EligibleKey(
            record.environment, identity, record.kind, record.merchant_id, record.networks, purses, within
        )

    def _purse(
        self, asked: VerifyRequest, record: KeyRecord, holding: EligibleKey, rules: PolicySnapshot
    ) -> SpendPlan | None:
        question = self._question(asked, holding, rules)
        way = None if question is None else self._ways.get(question)
        if way is None or way.rules is not rules:
            return None
        purse = holding.purses.by_way.get(way)
        if purse is None:
            buckets: tuple[Bucket, ...] = ()
            if way.endpoint.spends:
                limit, setting = rules.endpoint_limit(record.account_id, record.environment, way.endpoint)
                buckets = self.ports.buckets(record, way.endpoint, limit, setting)
            if len(holding.purses.by_way) >= MOST_WAYS:
                holding.purses.by_way.clear()
            purse = holding.purses.by_way[way] = SpendPlan(way, buckets, self.ports.budgets)
        return purse

    def learn(self, asked: VerifyRequest, judgement: Judgement, endpoint: Endpoint, rules: PolicySnapshot) -> None:
        """Store a grant of the slow path as the template for later requests. The caller holds the lock."""
        record = judgement.record
        if record is None or judgement.customer is not None or rules is not self.rules:
            return
        holding = self._holding(record)
        question = None if holding is None else self._question(asked, holding, rules)
        if question is None:
            return
        way = self._ways.get(question)
        if way is not None and way.rules is rules:
            return  # unchanged; spend plans are keyed by this object
        if len(self._ways) >= MOST_WAYS:
            self._ways.clear()
        self._ways[question] = GrantTemplate(judgement, endpoint, rules)

    def learn_denial(
        self, verdict: EngineVerdict, authorization: bytes, body: bytes, proved: TokenRecord, rules: PolicySnapshot
    ) -> None:
        """Cache a final denial of the slow path, for a terminated key. The caller holds the lock."""
        record = verdict.judgement.record
        if record is None or record.state not in DEAD_STATES or rules is not self.rules:
            return
        known = self.memory.keys.by_id.get(record.key_id)
        token = self.memory.tokens.by_id.get(proved.service.token_id)
        if known is None or known.record is not record or token is None or token.record is not proved:
            return
        words = f"{verdict.user_agent} {verdict.source} {verdict.origin}"
        if self._mark in words or SHAPED.search(words) is not None:
            return  # a text that may contain a key is stored masked only
        (tag,) = self.question_tags(authorization, [body])
        self.memory.remember_denial(tag, CachedDenial(token, known, rules, verdict))

    def _question(self, asked: VerifyRequest, holding: EligibleKey, rules: PolicySnapshot) -> tuple[object, ...] | None:
        """Return the parts of a request that decide its template.

        None for what is judged each time: a private key with an origin, a merchant other than the key's, a key in the
        path.
        """
        has_origin = asked.origin is not UNSET and asked.origin is not None
        merchant, store, name = asked.merchant or None, asked.store or None, asked.endpoint
        if has_origin and holding.kind is KeyKind.PRIVATE:
            return None
        if merchant is not None and merchant != holding.merchant:
            return None
        context = merchant
        if name is UNSET:
            path = asked.path or ""
            if find_exposed(path) is not None:
                return None
            base = self.base_paths[asked.environment]
            endpoint = rules.catalog.match(asked.method or "", path, base)
            if not isinstance(endpoint, Endpoint):
                return None
            name = endpoint.name
            context, store = endpoint.read_contexts(path, {}, merchant, store)
            if context is not None and context != holding.merchant:
                return None
        elif store is not None:
            store = store.strip() or None
        return (
            asked.environment,
            name,
            holding.kind,
            has_origin,
            merchant is not None,
            context is not None,
            store is not None,
        )

    def caller(self, service: Service) -> Caller:
        return Caller(service, self.ports.environments, self.ports.outcome(service.is_probe))

    # --- evidence -----------------------------------------------------------------------------------------------

    def take_uses(self) -> tuple[Collection[Tally], int]:
        """Return and reset the recorded uses and the number of answers from memory.

        Every use recorded before the call is in this result or in an earlier one.
        """
        with self.lock:
            uses, self._uses = self._uses, {}
            self._period += 1
            from_memory, self.answered_from_memory = self.answered_from_memory, 0
        return uses.values(), from_memory


def _is_of_more(asked: VerifyRequest) -> bool:
    """Return whether the request involves a customer token or is a dry run."""
    return asked.customer_token not in (UNSET, None) or asked.dry_run is True


def _request_ids(random_bytes: Callable[[int], bytes]) -> Iterator[bytes]:
    """Yield ids in the form of `mint_request_id`: a random prefix, unique to the process, and a counter."""
    front = random_digits(_ID_DIGITS - _COUNTED, random_bytes)
    blocks = (f"{front}{encode(high, _COUNTED - 2)}".encode() for high in count())
    return chain.from_iterable(map(block.__add__, _PAIRS) for block in blocks)


_ID_DIGITS, _COUNTED = 22, 9
_PAIRS = [encode(number, 2).encode() for number in range(62**2)]
