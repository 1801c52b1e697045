"""Delivery by webhook: the merchant's own endpoint is told where the replacement is, and has to take the news.

The message carries ids, and the replacement itself only where it is sealed to the recipient's key. It goes through
the outbox, so that an endpoint that is away holds up nothing but this delivery.
"""

from keyvault.access.decision import Grant
from keyvault.domain.canonical import JsonValue
from keyvault.domain.notifications import NoticeKind
from keyvault.domain.plaintext import Plaintext
from keyvault.models import Key
from keyvault.services.notifications import announce
from keyvault.services.webhook_deliveries import find_telling
from rotation.deployers.base import Standing
from rotation.models import Rotation


class MerchantWebhook:
    """A `Deployer`."""

    def deploy(self, key: Key, text: Plaintext, *, purpose: str, after: int | None) -> None:
        """Nothing: no secret goes over a webhook."""

    def announce(self, grant: Grant, rotation: Rotation) -> None:
        payload: dict[str, JsonValue] = {
            "rotation_id": rotation.rotation_id,
            "credential_id": rotation.credential_id,
            "replacement_key_id": rotation.replacement_id,
        }
        if rotation.handover is not None:
            payload["sealed"] = dict(rotation.handover)
        account = rotation.credential.account
        announce(grant, NoticeKind.REPLACEMENT_AVAILABLE, account, rotation.rotation_id, **payload)

    def find_standing(self, rotation: Rotation) -> Standing:
        """Taken once is taken for good: deliveries are not kept for ever, `told_at` is."""
        if rotation.told_at is not None:
            return Standing(rotation.told_at)
        told = find_telling(NoticeKind.REPLACEMENT_AVAILABLE, rotation.rotation_id)
        return Standing(told.delivered_at, told.has_failed, told.reason)
