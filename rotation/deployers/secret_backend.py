"""Delivery by the secret backend: the merchant reads the newest version at the credential's path."""

from keyvault.access.decision import Grant
from keyvault.backends.base import StoredSecret
from keyvault.domain.plaintext import Plaintext
from keyvault.models import Credential, Key
from keyvault.services.material import find_stored, newest_version, store_string
from rotation.deployers.base import Standing
from rotation.models import Rotation


class SecretBackend:
    """A `Deployer`. A foreign writer's version is never written over: ForeignWriterError."""

    def deploy(self, key: Key, text: Plaintext, *, purpose: str, after: int | None) -> int:
        return store_string(key, text, purpose=purpose, after=after)

    def announce(self, grant: Grant, rotation: Rotation) -> None:
        """Nothing: whoever reads there finds it."""

    def find_standing(self, rotation: Rotation) -> Standing:
        return Standing(rotation.delivered_at)

    def deploy_again(self, key: Key, text: Plaintext, *, purpose: str, after: int) -> int:
        """As a new version even if it is the newest one: whoever still writes after the older one then fails."""
        return store_string(key, text, purpose=purpose, after=after, again=True)

    def find_version(self, key: Key) -> int | None:
        stored = find_stored(key.credential)
        return stored.version if stored is not None and stored.labels.get("key_id") == key.key_id else None

    def find_newest(self, credential: Credential) -> StoredSecret | None:
        return find_stored(credential)

    def newest_version(self, credential: Credential) -> int:
        return newest_version(credential)
