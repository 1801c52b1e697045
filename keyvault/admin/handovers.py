"""A key inside a wrapping token, in the console: shown once with what goes with it, and what its receiver says then."""

from keyvault.admin.acts import Done
from keyvault.admin.cells import Facts, moment, mono
from keyvault.backends.base import Wrapped

ARRIVED, NOT_OPENED = "arrived", "not-opened"

_HAND_OVER = (
    "the token and the path by different ways. The receiver looks the token up (sys/wrapping/lookup): its creation "
    "path is exactly this one, or it is not ours and is not opened. Then it opens once."
)


def show_wrapped(wrapped: Wrapped) -> Done:
    """The token, which is shown here and nowhere else, with the path that goes to the receiver by another way."""
    return Done(
        "The wrapping token",
        secret=wrapped.token,
        beside=Facts(
            "For whoever opens it",
            [
                ("Creation path", mono(wrapped.creation_path)),
                ("It opens until", moment(wrapped.expires_at)),
                ("Hand over", _HAND_OVER),
            ],
        ),
        then=(ARRIVED, NOT_OPENED),
    )


def what_wrapping_does() -> str:
    return (
        "A token of the secrets manager is shown on the next page, this once. It opens to the key once, within a few "
        "minutes. If one was given before, its key is ended and another is made, for you to collect in a moment; if "
        "somebody has opened that one, it is treated as an interception. If its receiver has the key, say that it "
        "arrived instead."
    )


def what_arriving_does() -> str:
    return "The receiver has opened the token and has the key. Its copy in the secret backend is destroyed."


def what_suspecting_does() -> str:
    return (
        "If somebody else opened the token, or it expired: an alarm is raised, the key is ended, and another one is "
        "made under the same approval. If nobody has opened it, nothing happens."
    )
