"""Key material at rest: HMAC-SHA256 under a versioned pepper, one set for each place a key may be good.

The secret has 256 random bits, so a fast keyed hash is the right one (OWASP ASVS 5.0, 6.5.2): there is
nothing to guess, and the pepper makes a stolen database useless by itself. A key carries the version of the
pepper that made its digest; that one and no other is tried.
"""

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from keyvault.domain.environments import Environment
from keyvault.domain.plaintext import Plaintext

DIGEST_BYTES = 32
PEPPER_BYTES = 32
BLOCK_BYTES = 64
"""Of SHA-256."""


class PepperSet(StrEnum):
    """One per environment, and one for service tokens, which every process loads."""

    SANDBOX = "sandbox"
    PRODUCTION = "production"
    SERVICE = "service"


PEPPER_SET = {
    Environment.SANDBOX: PepperSet.SANDBOX,
    Environment.PRODUCTION: PepperSet.PRODUCTION,
}


class Mac:
    """HMAC-SHA256 (RFC 2104) of one key, whose two pads are hashed once and not for each text: a third of the time."""

    __slots__ = ("_inner", "_outer")

    def __init__(self, key: bytes) -> None:
        """`key` of at most a block: the RFC hashes a longer one first."""
        if len(key) > BLOCK_BYTES:
            raise ValueError(f"a key of more than {BLOCK_BYTES} bytes")
        padded = key.ljust(BLOCK_BYTES, b"\0")
        self._inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in padded))
        self._outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in padded))

    def digest(self, text: bytes) -> bytes:
        inner, outer = self._inner.copy(), self._outer.copy()
        inner.update(text)
        outer.update(inner.digest())
        return outer.digest()


@dataclass(frozen=True, slots=True)
class Peppers:
    """The loaded pepper versions of one set. Its repr names versions, never material.

    `hashing_version` is what new digests are made with, None: the newest. A newer one proves keys already, and makes
    digests once every process has loaded it.
    """

    pepper_set: PepperSet
    versions: Mapping[int, bytes]
    hashing_version: int | None = None
    current_version: int = field(init=False, repr=False, compare=False)
    _macs: Mapping[int, "Mac"] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        macs = {version: Mac(pepper) for version, pepper in self.versions.items()}
        object.__setattr__(self, "_macs", macs)
        current = max(self.versions, default=0) if self.hashing_version is None else self.hashing_version
        object.__setattr__(self, "current_version", current)

    def __repr__(self) -> str:
        return f"Peppers({self.pepper_set}, versions={sorted(self.versions)})"

    def lacks(self, version: int) -> bool:
        """Whether that version came after these were loaded: nothing can be said of what was hashed with it.

        A version that is neither here nor newer was retired, and proves nothing any more.
        """
        return version > max(self.versions)

    def digest(self, text: Plaintext, version: int | None = None) -> tuple[bytes, int]:
        """The digest of a whole key string, and the version that made it (the current one unless named)."""
        chosen = self.current_version if version is None else version
        return self._macs[chosen].digest(text.reveal().encode("ascii")), chosen

    def matches(self, text: Plaintext, digest: bytes, version: int) -> bool:
        """Compares in constant time. An unknown version costs the same and never matches."""
        mac = self._macs.get(version, _DECOY)
        made = mac.digest(text.reveal().encode("ascii"))
        return hmac.compare_digest(made, digest) and mac is not _DECOY

    def check_value(self, version: int) -> bytes:
        """Tells one pepper from another without giving either away (a key check value, 16 bytes).

        The set's name is inside the MAC, so that swapped environments do not agree.
        """
        label = f"keyvault/pepper-check/{self.pepper_set}/{version}".encode()
        return hmac.digest(self.versions[version], label, hashlib.sha256)[:16]


_DECOY = Mac(hashlib.sha256(b"keyvault/decoy-pepper").digest())

DECOY_DIGEST = hashlib.sha256(b"keyvault/decoy-digest").digest()
"""What an unknown key is compared with, so that absence costs what a wrong secret costs."""

DECOY_VERSION = 0
"""No pepper has this version."""
