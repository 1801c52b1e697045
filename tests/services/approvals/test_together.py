"""The digest of an approval of several requests."""

from keyvault.services.approvals.together import combine_digests

SHOWN = {"keyvault.issuancerequest:req_1": {"plan_digest": "a" * 64}, "rotation.retirement:7": {"version": 3}}


def test_combined_digest_covers_each_id_and_what_was_shown_of_it_in_any_order() -> None:
    """Guarantee: another request, one less, or another digest of one of them has another combined digest."""
    combined = combine_digests(SHOWN)
    assert combine_digests(dict(reversed(SHOWN.items()))) == combined
    others = [
        {**SHOWN, "rotation.retirement:7": {"version": 4}},
        {**SHOWN, "rotation.retirement:8": {"version": 3}},
        {"rotation.retirement:7": {"version": 3}},
        {},
    ]
    assert len({combined, *map(combine_digests, others)}) == 5
