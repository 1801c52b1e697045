"""Second factors of operators. This release has none: an operator signs in with a password."""

from collections.abc import Iterable

from keyvault.access.decision import Grant
from keyvault.models import Operator
from keyvault.services.operators.operators import CHANGING
from keyvault.services.recording.transaction import recorded


def list_with_second_factor(operators: Iterable[Operator]) -> set[int]:
    """Return the primary keys of those operators that have a second factor."""
    return set()


def reset_second_factors(grant: Grant, operator: Operator) -> None:
    """Remove all second factors of an operator, and end its sessions."""
    with recorded(grant, CHANGING, "operator.second_factors_reset", username=operator.username):
        operator.compare_and_swap()
