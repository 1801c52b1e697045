"""Events that another application may react to, as Django signals.

Those of keys and notices are sent inside the transaction of the event, after its other writes. A receiver may write
rows that it locks last; its failure rolls the transaction back.
"""

from django.dispatch import Signal

keys_changed = Signal()
"""Keys were written, other than their digests.

`key_ids`: their ids. `permission`: the one that the writer used. `now`: the event's time.
"""

accounts_changed = Signal()
"""Merchants or accounts were written. `merchants`: merchant ids. `accounts`: account names. `now`: the event's time."""

keys_refused = Signal()
"""A process reported uses of keys that were refused, and committed them. `key_ids`, `now`: the time of the report."""

changes_confirmed = Signal()
"""A verifier confirmed changes, and committed that.

`above`, `through`: the range of their sequences. `now`: the event's time.
"""

notice_settled = Signal()
"""The first delivery of a notice succeeded, or one was given up. `notice`, `now`: the event's time."""
