"""Ports of the engine: what it needs from its environment."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from keyvault.access.catalog import Endpoint
from keyvault.access.judgement import Judgement
from keyvault.access.limits import Bucket, Limit, Spend
from keyvault.access.verification import TokenRecord
from keyvault.domain.digests import Peppers, PepperSet
from keyvault.domain.environments import Environment
from keyvault.domain.ids import Subject
from keyvault.domain.keys import KeyRecord
from keyvault.domain.keystring import KeyString
from keyvault.wire.entry_points import VerificationEntryPoint


class EngineBudgets(Protocol):
    """Rate-limit budgets, see `services.limits.budgets`."""

    is_local: bool

    def spender(self, buckets: tuple[Bucket, ...]) -> Callable[[int], tuple[int, ...] | None]: ...

    def spend(self, buckets: tuple[Bucket, ...], cost: int, *, refuse_on_loss: bool) -> Spend: ...


class GenerationSource(Protocol):
    """The host's generation counter, see `services.recording.host_generation`."""

    memory: memoryview

    def since(self, seen: int) -> tuple[int, Iterable[Subject] | None]: ...


@dataclass(frozen=True, slots=True)
class EngineVerdict:
    """A verdict with the context that is recorded.

    `endpoint` is "" when no catalog entry matched. `is_from_memory`: a cached denial was given again.
    """

    judgement: Judgement
    request_id: str
    entry_point: VerificationEntryPoint
    environment: Environment
    endpoint: str
    source: str
    user_agent: str
    origin: str | None
    is_probe: bool
    at: datetime
    is_from_memory: bool = False


@dataclass(frozen=True, slots=True)
class Ports:
    """Dependencies of an engine; `adapters.assembly` supplies them.

    `loaded_peppers` does no I/O and raises VerifierStaleError while no pepper is loaded. `peppers` may block to load
    them where the frontend may block.
    """

    key_prefix: str
    environments: frozenset[Environment]
    base_urls: Mapping[Environment, str]
    generation: GenerationSource
    budgets: EngineBudgets
    monotonic: Callable[[], float]
    wall: Callable[[], float]
    random_bytes: Callable[[int], bytes]
    loaded_peppers: Callable[[PepperSet], Peppers]
    peppers: Callable[[PepperSet], Peppers]
    take_pepper: Callable[[Peppers, int], Peppers]
    buckets: Callable[[KeyRecord, Endpoint, Limit | None, str], tuple[Bucket, ...]]
    note_failed_proof: Callable[[str | None], int | None]
    note_key_proof: Callable[[KeyRecord, KeyString, Peppers], None]
    note_token_proof: Callable[[TokenRecord, KeyString, Peppers], None]
    note_verdict: Callable[[EngineVerdict], None]
    note_refusal: Callable[[str, str], None]
    """Count a request that was refused before a verdict, by entry point and code."""
    note_slow_path: Callable[[float], None]
    """Count the duration of a request on the slow path, in seconds."""
    note_new_use: Callable[[str, str, str, str, str, str, float], None]
    outcome: Callable[[bool], str]
    """Outcome under which a use is counted, by whether the caller is a probe."""
