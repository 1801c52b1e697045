"""Events that another application may react to, as Django signals.

Each is sent inside the transaction of the event, after its own writes. A receiver may write rows that it locks last;
its failure rolls the transaction back.
"""

from django.dispatch import Signal

keys_changed = Signal()
"""Keys were written. `key_ids`: their ids. `permission`: the writer's. `now`: the event's time."""

accounts_changed = Signal()
"""Merchants or accounts were written. `merchants`: merchant ids. `accounts`: account names. `now`: the event's time."""
