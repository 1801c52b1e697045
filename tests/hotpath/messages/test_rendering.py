"""Templates of answers for all keys of an account and kind, filled with the identity of one key."""

import hypothesis.strategies as st
from hypothesis import given
from msgspec.structs import replace

from keyvault.domain.environments import Environment
from keyvault.domain.keys import KeyKind
from keyvault.hotpath.messages.rendering import identity_template, identity_text
from tests.hotpath.engine.test_memory import KEY


@given(
    merchant=st.text(max_size=20)
    | st.sampled_from(["<key id>", "<credential id>", "100%b", 'a"b', "%", "<key id><key id>"]),
    kind=st.sampled_from(KeyKind),
    environment=st.sampled_from(Environment),
)
def test_template_filled_is_the_text(merchant: str, kind: KeyKind, environment: Environment) -> None:
    record = replace(
        KEY, key_id="0" * 16, credential_id="crd_1", merchant_id=merchant, kind=kind, environment=environment
    )
    filled = identity_template(record) % (record.key_id.encode(), record.credential_id.encode())
    assert filled == identity_text(record)
    other = replace(record, key_id="1" * 16, credential_id="crd_2")
    assert identity_template(record) == identity_template(other)
