"""Rotate the key that signs the console's sessions and cookies."""

from typing import Final

from django.conf import settings

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission
from keyvault.backends.private_files import new_secret, read_private_file, remove_private_file, write_private_file
from keyvault.domain.errors import RequestInvalidError
from keyvault.services.recording.transaction import recorded

KEY_NAME: Final = "django.key"
FALLBACK_NAME: Final = "django.key.previous"


def rotate_session_key(grant: Grant, *, ends_sessions: bool) -> None:
    """Replace the key in the data folder. A process uses it after its restart.

    The former key verifies sessions for as long as one lasts, unless `ends_sessions`. The audit entry comes first, so
    that no key changes without one. A run that was killed is started again. Raises RequestInvalidError if the key
    comes from KEYVAULT_SECRET_KEY or its file, and ImproperlyConfigured if the file in
    the data folder is missing or others may read it.
    """
    if settings.IS_SESSION_KEY_SET:
        raise RequestInvalidError(
            "The key comes from KEYVAULT_SECRET_KEY or its file. On every host move its value to "
            "KEYVAULT_SECRET_KEY_FALLBACK or its file, or drop it to end all sessions. Replace it with a new one "
            "(openssl rand -base64 48), and restart."
        )
    current, fallback = settings.DATA_DIR / KEY_NAME, settings.DATA_DIR / FALLBACK_NAME
    former = read_private_file(current)
    with recorded(grant, Permission.INSTALLATION_MAINTAIN, "session_key.rotated", ends_sessions=ends_sessions):
        pass
    if ends_sessions:
        remove_private_file(fallback)
    else:
        write_private_file(fallback, former)
    write_private_file(current, new_secret())
