"""Text that people and clients write: it is kept for good, so no key string may hide in it.

A name that somebody chooses is refused with the reason, for they can choose another. What is only told along
with an act (a reason, a user agent) is kept without the secret: the act must not fail for it.
"""

from keyvault.domain.keystring import SHAPED
from keyvault.domain.redaction import redact

READ_AT_MOST = 512
"""Of what a client says no more than this is looked at: a longer text costs the request path nothing."""

WORDS_KEPT = 120
"""Of a user agent, and of an origin."""


def clean_text(text: str, longest: int) -> str:
    """The text without its secrets, and no longer than `longest`. Idempotent."""
    return redact(text)[:longest]


def find_text_fault(text: str, longest: int) -> str | None:
    """What is wrong with a chosen name, as a demand; None when nothing is. Never quotes the text."""
    if not 1 <= len(text) <= longest or not text.isprintable():
        return f"1 to {longest} printable characters"
    if SHAPED.search(text) is not None:
        return "no key string: it would be kept and shown"
    return None


def find_reason_fault(text: str) -> str | None:
    """A reason that somebody has to give is told along with an act, see `clean_text`; a blank one is none."""
    return None if text.strip() else "say why"
