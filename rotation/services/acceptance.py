"""Who has to confirm that they would accept a new key before it is given to anybody, and who has.

A verifier answers from memory, and could refuse what it has not heard of yet: each live one confirms the change by
which the key became active. One that is silent for longer than its staleness bound reads the database for each
verdict, so that it accepts the key too and is not waited for.
"""

from keyvault.models import Key
from keyvault.services import receipts
from keyvault.services.keys import last_sequence


def list_unconfirmed(key: Key) -> list[str]:
    """The ids of the verifiers that are waited for: live, and without the newest change of the key."""
    return receipts.list_unconfirmed(last_sequence(key))
