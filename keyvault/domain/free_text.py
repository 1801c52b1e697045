"""Free text from people and clients. It is stored permanently, so it must not contain a key string.

A chosen name with a key string is rejected, because the author can choose another. Text that accompanies an action
(a reason, a user agent) is stored with the secret masked, because it must not make the action fail.
"""

from keyvault.domain.keystring import SHAPED
from keyvault.domain.redaction import redact

MAX_REDACTED_LENGTH = 512
"""Maximum length of client text that is redacted, in characters. It bounds the cost on the request path."""

MAX_STORED_LENGTH = 120
"""Maximum stored length of a user agent or an origin, in characters."""


def clean_text(text: str, max_length: int) -> str:
    """Mask the secrets in a text and truncate it to `max_length` characters. Idempotent."""
    return redact(text)[:max_length]


def find_text_fault(text: str, max_length: int) -> str | None:
    """Return the requirement that a chosen name fails, or None. Never quotes the text."""
    if not 1 <= len(text) <= max_length or not text.isprintable():
        return f"1 to {max_length} printable characters"
    if SHAPED.search(text) is not None:
        return "must not contain a key string, because it is stored and shown"
    return None


def find_reason_fault(text: str) -> str | None:
    """Return the fault of a mandatory reason if it is blank, else None. `clean_text` masks its secrets."""
    return None if text.strip() else "a reason is required"


def escape_unprintable(text: str) -> str:
    """Return the text with each character that is not printable as an escape, such as a line end or a terminal's ESC.

    The result is one line, which a terminal shows as it is. For text of clients in the output of commands.
    """
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii") for letter in text
    )
