"""Rotate the key that signs the console's sessions and cookies."""

from typing import Final

from django.conf import settings

from keyvault.access.decision import Grant
from keyvault.access.limits import SESSION_SECONDS
from keyvault.access.permissions import Permission
from keyvault.backends.private_files import (
    find_recent_secret,
    new_secret,
    read_private_file,
    remove_private_file,
    write_private_file,
)
from keyvault.domain.errors import RequestInvalidError, StateConflictError
from keyvault.services.recording.transaction import recorded

KEY_NAME: Final = "django.key"
FALLBACK_NAME: Final = "django.key.previous"


def rotate_session_key(grant: Grant, *, ends_sessions: bool) -> None:
    """Replace the key in the data folder. A process uses it after its restart.

    The former key verifies sessions for as long as one lasts, unless `ends_sessions`. The audit entry comes first, so
    that no key changes without one. A run that was killed is started again.

    Raises:
        RequestInvalidError: the key comes from KEYVAULT_SECRET_KEY or its file.
        StateConflictError: without `ends_sessions`, and the former key still verifies sessions.
        ImproperlyConfigured: the file in the data folder is missing, or others may read it.
    """
    if settings.IS_SESSION_KEY_SET:
        raise RequestInvalidError(
            "The key comes from KEYVAULT_SECRET_KEY or its file. On every host move its value to "
            "KEYVAULT_SECRET_KEY_FALLBACK or its file, or drop it to end all sessions. Replace it with a new one "
            "(openssl rand -base64 48), and restart."
        )
    current, fallback = settings.DATA_DIR / KEY_NAME, settings.DATA_DIR / FALLBACK_NAME
    former = read_private_file(current)
    # The two are equal if a run was killed between its files.
    if not ends_sessions and find_recent_secret(fallback, SESSION_SECONDS) not in (None, former):
        raise StateConflictError(
            f"The key was replaced within the last {SESSION_SECONDS // 3600} hours, and another rotation would end the "
            "sessions of the key before. The last rotation is complete, even if its run was killed. Copy "
            f"{KEY_NAME} and {FALLBACK_NAME} to each host, and restart every server. To end all "
            "sessions, use --end-sessions."
        )
    with recorded(grant, Permission.INSTALLATION_MAINTAIN, "session_key.rotated", ends_sessions=ends_sessions):
        pass
    if ends_sessions:
        remove_private_file(fallback)
    else:
        write_private_file(fallback, former)
    write_private_file(current, new_secret())
