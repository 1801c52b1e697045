"""Work on credentials while workers are killed: repeated rotations, rollbacks and leaks."""

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from keyvault.access.permissions import Permission as P
from keyvault.access.roles import Role
from keyvault.domain.errors import KeyvaultError, StateConflictError
from keyvault.domain.keys import KeyState
from keyvault.models import Key
from keyvault.services.recording.authorization import authorize
from rotation.domain.events import RotationState as S
from rotation.domain.plan_fields import Proof
from rotation.domain.states import CLOSED
from rotation.models import Rotation
from rotation.services.rotations.emergency import respond_to_compromise
from rotation.services.rotations.interventions import abort_rotation
from rotation.services.rotations.requests import reissue_key
from tests.factories import the_operator
from tests.faults.programs import until
from tests.faults.traffic import Merchant
from tests.rotation import scene

LEAKED = 4
"""Number of credentials (the last ones) whose keys are reported compromised at any stage of their rotation."""

ROLLED_BACK_EACH = 4
"""One in this many of the other rotations is rolled back once its replacement is delivered."""

LEAK_SHARE = 0.04
POLL_SECONDS = 0.2


class Workload:
    """Begins a rotation, proved by traffic and with the shortest periods, wherever none is open. Call `poll` often.

    `returned_at`: by key id, when the report of its compromise returned, in seconds since 1970.
    """

    def __init__(self, merchants: Sequence[Merchant], seed: int) -> None:
        self.ordinary, self._leaked = list(merchants[:-LEAKED]), list(merchants[-LEAKED:])
        self._rng = random.Random(seed)  # noqa: S311  not for secrets
        self._is_running = True
        self._polled_at = 0.0
        self.returned_at: dict[str, float] = {}
        self._counts: Counter[str] = Counter()

    def poll(self) -> None:
        if time.monotonic() - self._polled_at < POLL_SECONDS:
            return
        still_open = {rotation.credential_id: rotation for rotation in Rotation.objects.exclude(state__in=CLOSED)}
        for number, merchant in enumerate(self.ordinary):
            rotation = still_open.get(merchant.credential.pk)
            if rotation is None and self._is_running:
                rotate(merchant)
            elif rotation is not None and number % ROLLED_BACK_EACH == 0:
                self._roll_back(rotation)
        for merchant in self._leaked:
            self._leak(merchant, still_open.get(merchant.credential.pk))
        self._polled_at = time.monotonic()

    def end(self) -> None:
        """Begin nothing new, and replace the keys that were revoked by hand."""
        self._is_running = False

    def until_over(self, seconds: float, poll: Callable[[], None]) -> None:
        """Raises GaveUpError."""

        def poll_all() -> None:
            poll()
            self.poll()

        until("every rotation to be over", self._is_over, seconds, poll_all)

    def _is_over(self) -> bool:
        keyed = set(Key.objects.filter(state=KeyState.ACTIVE).values_list("credential_id", flat=True))
        return not Rotation.objects.exclude(state__in=CLOSED).exists() and all(
            merchant.credential.pk in keyed for merchant in self._leaked
        )

    def counts(self) -> dict[str, float]:
        """Return the number of rotations by final state, and the number of leaks."""
        ended = Counter(Rotation.objects.values_list("state", flat=True))
        return {"rotations": sum(ended.values()), **{state: ended[state] for state in sorted(ended)}, **self._counts}

    def _roll_back(self, rotation: Rotation) -> None:
        if rotation.state not in {S.AWAITING_PROOF, S.OVERLAP}:
            return
        grant = authorize(scene.tam(), P.ROTATIONS_WRITE, rotation.credential.account, now=datetime.now(UTC))
        try:
            abort_rotation(grant, rotation, "an experiment")
        except StateConflictError:
            self._counts["aborts refused"] += 1  # a worker holds the lease, or was faster

    def _leak(self, merchant: Merchant, rotation: Rotation | None) -> None:
        """Sometimes report a good key as compromised. Request a replacement where none is on the way."""
        credential, now = merchant.credential, datetime.now(UTC)
        active = list(Key.objects.filter(credential=credential, state=KeyState.ACTIVE))
        try:
            if not active and rotation is None:
                reissue_key(authorize(scene.tam(), P.ROTATIONS_WRITE, credential.account, now=now), credential, "leak")
                self._counts["reissued"] += 1
            elif active and self._is_running and self._rng.random() < LEAK_SHARE:
                responder = the_operator("responder", Role.INCIDENT_RESPONDER)
                grant = authorize(responder, P.KEYS_REPORT_COMPROMISE, credential.account, now=now)
                key = self._rng.choice(active)
                respond_to_compromise(grant, key, reason="an experiment", replace=True)
                self.returned_at[key.key_id] = time.time()
                self._counts["keys compromised"] += 1
            elif active and rotation is None and self._is_running:
                rotate(merchant)
        except KeyvaultError:
            self._counts["changes refused"] += 1  # a worker was faster


def rotate(merchant: Merchant) -> None:
    """Request a rotation with proof by 2 authentications from 1 source, 2 s of silence and 1 s of quarantine."""
    scene.rotate(
        merchant.credential,
        datetime.now(UTC),
        proof=Proof.TRAFFIC,
        proof_count=2,
        proof_sources=1,
        quiet_seconds=2,
        quarantine_seconds=1,
    )
