"""Secret text has a type of its own, so that it cannot slip into a log, a pickle or a template."""

from typing import NoReturn, Self

MASK = "***"


class Plaintext:
    """Secret text that shows itself to nobody but the caller of `reveal()`.

    `repr`, `str`, `format` and `%` give the mask; pickling, copying and JSON refuse. Two are never compared:
    proof is a digest compared in constant time, see `domain.digests`.
    """

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """The secret itself. Every call is greppable, and a house test lists the files that may make one."""
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
        raise TypeError("a plaintext is no dictionary key")

    def __deepcopy__(self, memo: object) -> Self:
        raise TypeError("a plaintext is never pickled or copied")
