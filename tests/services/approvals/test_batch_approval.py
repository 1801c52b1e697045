"""The digest of an approval of several requests."""

from keyvault.domain.canonical import JsonValue
from keyvault.services.approvals.batch_approval import combine_digests

SHOWN: dict[str, JsonValue] = {
    "keyvault.issuancerequest:req_1": {"plan_digest": "a" * 64},
    "rotation.retirement:7": {"version": 3},
}


def test_combined_digest_covers_each_id_and_what_was_shown_of_it_in_any_order() -> None:
    """Guarantee: another request, one less, or another digest of one of them has another combined digest."""
    combined = combine_digests(SHOWN)
    assert combine_digests({name: SHOWN[name] for name in reversed(SHOWN)}) == combined
    others: list[dict[str, JsonValue]] = [
        {**SHOWN, "rotation.retirement:7": {"version": 4}},
        {**SHOWN, "rotation.retirement:8": {"version": 3}},
        {"rotation.retirement:7": {"version": 3}},
        {},
    ]
    assert len({combined, *(combine_digests(other) for other in others)}) == 5
