"""A type for secret text, which keeps it out of logs, pickles and templates."""

from typing import NoReturn, Self

MASK = "***"


class Plaintext:
    """Secret text that only `reveal()` returns.

    `repr`, `str`, `format` and `%` return the mask; pickling, copying and JSON raise TypeError. So does comparison:
    proof compares digests in constant time, see `domain.digests`.
    """

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """Return the secret. An architecture test lists the files that may call this."""
        return self._text

    def __repr__(self) -> str:
        return f"Plaintext({MASK})"

    def __str__(self) -> str:
        return MASK

    def __format__(self, spec: str) -> str:
        return MASK

    def __reduce__(self) -> NoReturn:
        raise TypeError("a plaintext is never pickled or copied")

    def __eq__(self, other: object) -> NoReturn:
        raise TypeError("plaintexts are compared by digest, in constant time")

    def __hash__(self) -> NoReturn:
        raise TypeError("a plaintext is not hashable")

    def __deepcopy__(self, memo: object) -> Self:
        raise TypeError("a plaintext is never pickled or copied")
