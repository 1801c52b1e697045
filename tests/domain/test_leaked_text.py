"""Ids in pasted text: every shape of a credential string, and bare key ids."""

from keyvault.domain.keystring import StringKind
from keyvault.domain.leaked_text import LeakedId, find_leaked_ids
from tests.domain.minting import mint


def test_leaked_ids_are_found_in_every_shape() -> None:
    whole = mint()
    key_id = whole[-65:-49]
    text = "\n".join([whole, whole[:-1], whole.replace("_", "%5F"), f"id={key_id};", key_id, "responsibilities"])
    found = list(find_leaked_ids(text, whole.partition("_")[0]))
    assert [(each.line, each.public_id) for each in found[:5]] == [(line, key_id) for line in range(1, 6)]
    assert found[0].is_whole
    assert not found[1].is_whole
    assert isinstance(found[0].kind, StringKind)
    assert found[3] == LeakedId(4, key_id, None)
    assert found[4].is_alone
    assert not any(whole[-49:-43] in repr(each) for each in found)


def test_leaked_ids_of_two_keys_in_a_line_are_both_found() -> None:
    first, second = mint(), mint()
    found = list(find_leaked_ids(f"{first},{second}", first.partition("_")[0]))
    assert [each.public_id for each in found] == [first[-65:-49], second[-65:-49]]
