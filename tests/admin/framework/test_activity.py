"""Audit entries as sentences."""

import re

import pytest

from keyvault.admin.framework.activity import SPECIAL, sentence_of
from rotation.domain.events import RotationState
from tests.environment import ROOT


@pytest.mark.parametrize(
    ("event", "actor", "sentence"),
    [
        ("rotation.requested", "operator:tam", "Rotation requested by tam"),
        ("key.stored", "system:worker", "Key written to the secret backend by worker"),
        ("journal.loss_accepted", "host", "Loss of the revocation log accepted by host"),
        ("merchant.offboarding_began", "host", "Merchant offboarding began by host"),
    ],
)
def test_sentence_names_what_happened_and_who_did_it(event: str, actor: str, sentence: str) -> None:
    assert sentence_of(event, actor) == sentence


def test_special_sentences_are_of_events_that_are_recorded_or_announced() -> None:
    folders = (ROOT / "keyvault" / "services", ROOT / "rotation" / "services")
    paths = [
        ROOT / "keyvault" / "domain" / "notifications.py",
        *(path for each in folders for path in each.rglob("*.py")),
    ]
    code = "".join(path.read_text() for path in paths)
    # The event of a rotation's transition is the name of the state that it enters.
    transitions = {f"rotation.{state}" for state in RotationState}
    assert {event for event in SPECIAL if re.search(rf'"{re.escape(event)}"', code) is None} <= transitions
