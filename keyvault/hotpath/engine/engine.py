"""The verifier's engine: bytes in, bytes out, without a framework and without waiting for anybody.

    engine.verify_known(authorization, body) -> Answer | Missed | None   what is in memory, and yes
    engine.verify_missed([missed], {key id: record}) -> [Answer | None]   once the key was read

Every other question goes the whole way, see `answering`.

What is remembered is good as long as nobody has changed it. Before each decision the host's generation word is
compared, and what was changed is forgotten before anybody answers; changes of other hosts come by `evict`, and
`Freshness` says how long ago that was known to be all of them. A reading that a change came across serves the question
that it was made for, and is not remembered.
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
from keyvault.domain.free_text import MAX_REDACTED_LENGTH, MAX_STORED_LENGTH, clean_text
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
"""A proved token, and the tag of its question: `Engine.question_tags`."""


class Engine:
    """One for each process; its threads share it."""

    def __init__(self, ports: Ports, freshness: Freshness, capacity: int) -> None:
        self.ports = ports
        self.freshness = freshness
        self.base_paths = {env.value: urlsplit(url).path for env, url in ports.base_urls.items()}
        self.memory = Memory(ports.random_bytes(32), capacity)
        self.rules: PolicySnapshot | None = None
        self.lock = threading.Lock()
        self.changes = 0
        """Counts what was forgotten: a reading that began before is not remembered after it."""
        self.answered_from_memory = 0
        self._ways: dict[tuple[object, ...], GrantTemplate] = {}
        self._purses: OrderedDict[tuple[object, ...], SpendPlans] = OrderedDict()
        self._all_purses: WeakSet[SpendPlans] = WeakSet()
        """Also of accounts that are no longer among these, and whose keys are remembered."""
        self._uses: dict[Use, Tally] = {}
        self._clean: dict[str, str] = {}
        """What clients say about themselves and has nothing to hide, as it is kept: the same few stand beside thousands
        of keys."""
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
        """The answer of POST /v1/keys/verify when all of it is in memory and it is yes, or no for ever. Missed: but for
        the key, which `verify_missed` takes once it was read. Else None, and nothing done.

        Asked with the whole Authorization header and the body; the rest of the request was found to be as usual.
        """

    # --- what is remembered, and for how long -------------------------------------------------------------------

    def evict(self, subjects: Iterable[Subject] | None) -> None:
        """Forgets what hangs on these; None: everything."""
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
            # Emptied and not dropped: keys that are remembered still have them, and with them the replaced rules.
            purses.by_way.clear()
            purses.by_name.clear()

    def catch_up(self) -> None:
        """Forgets what this host has changed since the last look. Under the lock.

        Where that cannot be read: everything, and nothing may be remembered until it can.
        """
        if self._words[0] != self._seen:
            try:
                seen, subjects = self.ports.generation.since(self._seen)
            except OSError:
                self._evict(None)
                return
            # First forgotten, then seen: whoever finds the word as it was seen may answer.
            self._evict(subjects)
            self._words = self.ports.generation.words
            self._seen = seen

    def may_remember(self) -> bool:
        """Whether memory may be answered from now. Under the lock, after `catch_up`."""
        has_caught_up = self._words[0] == self._seen
        return has_caught_up and self.freshness.may_vouch(self.ports.monotonic(), self.ports.wall())

    # --- the fast way -------------------------------------------------------------------------------------------

    def _make_verify_known(self) -> Callable[[bytes, bytes], HttpResponse | CacheMiss | None]:
        """`verify_known`, which answers nearly all that is ever asked: a function that has at hand whatever stays the
        same, and in which `may_vouch` is written out."""
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
            # Told without the lock: it is written to the log, and nobody else waits for that.
            at = datetime.fromtimestamp(wall, UTC)
            self.ports.note_verdict(replace(denied.verdict, request_id=request_id.decode(), at=at))
            return HttpResponse(200, denied.text % (request_id, request_id), request_id.decode())

        return verify_known

    def _verify_anew(
        self, authorization: bytes, body: bytes, tag: bytes, wall: float, request_id: bytes
    ) -> HttpResponse | CacheMiss | None:
        """By what is known of the token and the key; `tag` of the whole question."""
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
        """The answers by the keys that were found. None, and nothing done: when something was changed since it was
        asked, or there is more to say of it."""
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
        if known is None or known.record is not record:  # it is where several have asked for it at once
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
        """A grant as its JSON, spent and noted; None, and nothing done, for whatever is not that simple.

        `record` was read for this question; else it is looked for in memory, which then has to be fresh. `asker`: who
        may ask it again, see `CachedGrant`.
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
        """As `decide_known`, of a key that was proved. `is_plain`: it is as `requests.read_plain` gives it.

        Under the lock, so that no use is noted with a time from before a report that does not have it. Much of what it
        does is written out here, since a call costs as much as what is called.
        """
        name, rules, agent = asked.endpoint, self.rules, asked.user_agent
        cost, origin = 1, ""
        if not is_plain:
            cost, origin = asked.cost or 1, asked.origin or ""
            is_plain = name is not UNSET and asked.origin is UNSET and asked.merchant is UNSET and asked.store is UNSET
        words = self._clean.get(agent) if agent else ""
        if (agent and words is None and self._mark in agent) or (origin and self._mark in origin):
            return None  # of what may be a key only a masked text is kept
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
        """Of each body as this caller sends it. A header has no line break: none is taken for another's."""
        begun = self._new_tag()
        begun.update(authorization + b"\n")
        tags = []
        for body in bodies:
            made = begun.copy()
            made.update(body)
            tags.append(made.digest())
        return tags

    def decide_again(self, tags: Sequence[bytes], wall: float, request_id: bytes) -> dict[int, bytes]:
        """The grants of a batch by their numbers, when every question of it was granted before; else none, and nothing
        done: one that is malformed refuses them all. Under the lock, in memory that is fresh."""
        repeats = [self._repeats.get(tag) for tag in tags]
        if None in repeats:
            return {}
        decided: dict[int, bytes] = {}
        for number, repeat in enumerate(repeats):
            text = self._grant(repeat, wall, b"%b-%d" % (request_id, number))  # type: ignore[arg-type]  # there is one
            if text is not None:
                decided[number] = text
        self.answered_from_memory += len(decided)
        return decided

    def _grant(self, repeat: CachedGrant, wall: float, request_id: bytes) -> bytes | None:
        """Its JSON, spent and noted; None, and nothing done: it is to be decided anew."""
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
        if purse.is_single:  # as `fill` does it, without the call
            remaining, reset = standing
            return purse.text % (remaining, reset, request_id, repeat.identity, remaining, reset)
        return purse.template.fill(standing, request_id, repeat.identity)

    def _is_denied_still(self, denied: CachedDenial, wall: float) -> bool:
        """Whether nothing that the denial hangs on was forgotten, and the key could still be proved."""
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
        """As it is kept. (What looks like a key does not come this way.)"""
        read = text[:MAX_REDACTED_LENGTH]
        kept = self._clean.get(read)
        if kept is not None:
            return kept
        cleaned = clean_text(read, MAX_REDACTED_LENGTH)
        kept = cleaned[:MAX_STORED_LENGTH]
        if cleaned == read:
            if len(self._clean) >= _MOST_CLEAN:
                self._clean.clear()
            self._clean[read] = kept
        return kept

    def _tally(self, use: Use, wall: float) -> Tally:
        uses = self._uses
        tally = uses.get(use)
        if tally is None and len(uses) >= _MOST_USES:
            # Who it was is no longer told apart, before the next report; how many there were is.
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
        """The key that this string proves now, by `record` where one was read for it. A KeyString: nothing is known of
        its key. None: that is to be found out the whole way."""
        if text is None:
            return None
        if record is None and text[KEY_ID_PLACE] in self._keys_by_id:
            try:
                known = self._keys_by_tag.get(self.memory.tag(text.encode()))
            except UnicodeEncodeError:  # half a surrogate pair, which no key has
                return None
            if known is not None:
                known.is_asked_for = True  # again: who comes once makes room first
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
        """Whether the string is the key's; then a key that is remembered is known by the tag of it, which is `text`,
        from now on."""
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
        """None for a key that there is more to say of."""
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
        """A grant of the whole way, so that the next one like it goes the fast way. Under the lock."""
        record = judgement.record
        if record is None or judgement.customer is not None or rules is not self.rules:
            return
        holding = self._holding(record)
        question = None if holding is None else self._question(asked, holding, rules)
        if question is None:
            return
        way = self._ways.get(question)
        if way is not None and way.rules is rules:
            return  # as it would be again; purses are kept by it
        if len(self._ways) >= MOST_WAYS:
            self._ways.clear()
        self._ways[question] = GrantTemplate(judgement, endpoint, rules)

    def learn_denial(
        self, verdict: EngineVerdict, authorization: bytes, body: bytes, proved: TokenRecord, rules: PolicySnapshot
    ) -> None:
        """A denial of the whole way to a question of verify, where the key has ended for good: nothing but a change
        will make another answer of it. Under the lock."""
        record = verdict.judgement.record
        if record is None or record.state not in DEAD_STATES or rules is not self.rules:
            return
        known = self.memory.keys.by_id.get(record.key_id)
        token = self.memory.tokens.by_id.get(proved.service.token_id)
        if known is None or known.record is not record or token is None or token.record is not proved:
            return
        words = f"{verdict.user_agent} {verdict.source} {verdict.origin}"
        if self._mark in words or SHAPED.search(words) is not None:
            return  # of what may be a key only a masked text is kept
        (tag,) = self.question_tags(authorization, [body])
        self.memory.remember_denial(tag, CachedDenial(token, known, rules, verdict))

    def _question(self, asked: VerifyRequest, holding: EligibleKey, rules: PolicySnapshot) -> tuple[object, ...] | None:
        """What of a question makes a difference for a plain key. None for what has to be judged each time: a private
        key with an origin, another merchant than the key's own, a key in the path."""
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
        """The uses since the last time, and how many answers came from memory. Every use of before the call is among
        them, or was."""
        with self.lock:
            uses, self._uses = self._uses, {}
            self._period += 1
            from_memory, self.answered_from_memory = self.answered_from_memory, 0
        return uses.values(), from_memory


def _is_of_more(asked: VerifyRequest) -> bool:
    """Whether it is about more than a key, or less than a verdict."""
    return asked.customer_token not in (UNSET, None) or asked.dry_run is True


def _request_ids(random_bytes: Callable[[int], bytes]) -> Iterator[bytes]:
    """Of the form of `mint_request_id`: random in front, so that no two processes share one, and then counted."""
    front = random_digits(_ID_DIGITS - _COUNTED, random_bytes)
    blocks = (f"{front}{encode(high, _COUNTED - 2)}".encode() for high in count())
    return chain.from_iterable(map(block.__add__, _PAIRS) for block in blocks)


_ID_DIGITS, _COUNTED = 22, 9
_PAIRS = [encode(number, 2).encode() for number in range(62**2)]
