"""The contract of a deployer: one way by which a replacement comes to its merchant.

`deploy` is made outside any transaction and may be repeated after it was killed in the middle; `announce` is written
with the record of the delivery; `find_standing` reads our own rows alone, at every turn of the engine.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from keyvault.access.decision import Grant
from keyvault.domain.plaintext import Plaintext
from keyvault.models import Key
from rotation.models import Rotation


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a delivery came. `has_failed`: it will not arrive any more unless somebody does something; `why`."""

    arrived_at: datetime | None
    has_failed: bool = False
    why: str = ""


class Deployer(Protocol):
    """DependencyUnavailableError: nothing is known, try again. StateConflictError: it will never work like that."""

    def deploy(self, key: Key, text: Plaintext, *, purpose: str, after: int | None) -> int | None:
        """Brings the key there as the newest one. The number of its version; None where this way has no versions.

        `purpose`: the id of what it is done for, kept beside the key. `after`: the newest version when the key was
        made; somebody who was overtaken since then writes nothing. Repeated, it returns the same version.
        """
        ...

    def announce(self, grant: Grant, rotation: Rotation) -> None:
        """Inside the transaction that notes the delivery: whatever has to be told with it."""
        ...

    def find_standing(self, rotation: Rotation) -> Standing:
        """Whether the replacement has arrived by this way. Asks nobody but the database."""
        ...
