"""Standard Webhooks: the vectors of the standard, forged messages, and the times of retries."""

import base64
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyvault.domain.plaintext import Plaintext
from keyvault.wire.webhooks import (
    MAX_ATTEMPTS,
    MAX_RETRY_AFTER,
    TOLERANCE,
    DeliveryAssessment,
    DeliveryOutcome,
    SecretInvalidError,
    SignatureInvalidError,
    judge_response,
    mint_secret,
    next_attempt,
    sign,
    verify,
)

# The vector of the reference libraries (standard-webhooks/standard-webhooks, libraries/*, "sign").
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
MESSAGE_ID = "msg_p5jXN8AQM9LWM0D4loKWxJek"
AT = datetime.fromtimestamp(1_614_265_330, UTC)
BODY = b'{"test": 2432232314}'
SIGNATURE = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="

OTHER_SECRET = "whsec_" + base64.b64encode(bytes(32)).decode()
SECOND = timedelta(seconds=1)


def signed(**changed: str) -> dict[str, str]:
    return {**sign([Plaintext(SECRET)], MESSAGE_ID, AT, BODY), **changed}


# --- signing ---------------------------------------------------------------------------------------------------


def test_webhook_signature_equals_the_vector_of_the_standard() -> None:
    assert signed() == {
        "webhook-id": MESSAGE_ID,
        "webhook-timestamp": "1614265330",
        "webhook-signature": SIGNATURE,
    }


def test_webhook_signed_is_verified() -> None:
    assert verify(SECRET, signed(), BODY, AT) == MESSAGE_ID


def test_webhook_signed_by_two_secrets_is_verified_by_either() -> None:
    """During the rotation of a secret, a receiver may switch at any moment."""
    headers = sign([Plaintext(OTHER_SECRET), Plaintext(SECRET)], MESSAGE_ID, AT, BODY)
    assert headers["webhook-signature"].count("v1,") == 2
    assert verify(SECRET, headers, BODY, AT) == verify(OTHER_SECRET, headers, BODY, AT) == MESSAGE_ID


def test_webhook_with_signatures_of_other_versions_is_verified_by_its_own() -> None:
    others = "v1a,Ceo5qEr07ixe2NLpvHk3FH9bwy/WavXrAFQ/9tdO6mc= v2,AAAA"
    headers = signed(**{"webhook-signature": f"{others} {SIGNATURE} {others}"})
    assert verify(SECRET, headers, BODY, AT) == MESSAGE_ID


@given(st.binary(max_size=200), st.integers(0, 2**33), st.from_regex(r"ntc_[0-9A-Za-z]{20}", fullmatch=True))
def test_webhook_whatever_is_signed_is_verified(body: bytes, seconds: int, message_id: str) -> None:
    at = datetime.fromtimestamp(seconds, UTC)
    assert verify(SECRET, sign([Plaintext(SECRET)], message_id, at, body), body, at) == message_id


@pytest.mark.parametrize("name", ["webhook-id", "webhook-timestamp", "webhook-signature"])
@pytest.mark.parametrize(
    "value", ["", "x", "1614265331", SIGNATURE.replace("v1,", "v2,"), "v1,", "v1", "é", "\udcff", "-1", " "]
)
def test_webhook_with_another_header_is_refused(name: str, value: str) -> None:
    """Id, time and signature belong together: none can be exchanged."""
    with pytest.raises(SignatureInvalidError):
        verify(SECRET, signed(**{name: value}), BODY, AT)


@given(st.integers(0, len(BODY) - 1), st.integers(1, 255))
def test_webhook_with_one_byte_changed_is_refused(place: int, change: int) -> None:
    """A forged body is refused, wherever it was touched."""
    forged = bytearray(BODY)
    forged[place] ^= change
    with pytest.raises(SignatureInvalidError, match="no signature matches"):
        verify(SECRET, signed(), bytes(forged), AT)


def test_webhook_of_another_secret_is_refused() -> None:
    """A secret belongs to one endpoint: another's proves nothing here."""
    with pytest.raises(SignatureInvalidError, match="no signature matches"):
        verify(OTHER_SECRET, signed(), BODY, AT)


def test_webhook_signature_separates_its_fields() -> None:
    """A dot in the id would let `a.b` of one message be the id and time of another."""
    with pytest.raises(ValueError, match="a dot"):
        sign([Plaintext(SECRET)], "a.1", AT, BODY)


@pytest.mark.parametrize("off", [TOLERANCE, -TOLERANCE])
def test_webhook_within_the_tolerance_is_verified(off: timedelta) -> None:
    assert verify(SECRET, signed(), BODY, AT + off) == MESSAGE_ID


@pytest.mark.parametrize("off", [TOLERANCE + SECOND, -TOLERANCE - SECOND, timedelta(days=900)])
def test_webhook_of_another_time_is_refused(off: timedelta) -> None:
    """Guarantee: a recorded message is refused after the tolerance (replay)."""
    with pytest.raises(SignatureInvalidError, match="tolerance"):
        verify(SECRET, signed(), BODY, AT + off)


@given(st.dictionaries(st.sampled_from(list(signed())), st.text()), st.binary())
def test_webhook_of_arbitrary_headers_and_body_is_refused(headers: Mapping[str, str], body: bytes) -> None:
    """Guarantee: arbitrary headers and body raise SignatureInvalidError, never another exception."""
    with pytest.raises(SignatureInvalidError):
        verify(SECRET, headers, body, AT)


# --- secrets ---------------------------------------------------------------------------------------------------


def test_webhook_secret_generated_conforms_to_the_standard() -> None:
    secret = mint_secret(bytes)
    assert re.fullmatch(r"whsec_[A-Za-z0-9+/=]{44}", secret.reveal())
    assert verify(secret.reveal(), sign([secret], MESSAGE_ID, AT, BODY), BODY, AT) == MESSAGE_ID


@pytest.mark.parametrize("count", [24, 64])
def test_webhook_secret_of_the_lengths_of_the_standard_is_accepted(count: int) -> None:
    secret = "whsec_" + base64.b64encode(bytes(count)).decode()
    assert verify(secret, sign([Plaintext(secret)], MESSAGE_ID, AT, BODY), BODY, AT) == MESSAGE_ID


@pytest.mark.parametrize(
    "secret",
    [
        "",
        "whsec_",
        "whsec_" + base64.b64encode(bytes(23)).decode(),
        "whsec_" + base64.b64encode(bytes(65)).decode(),
        SECRET.removeprefix("whsec_"),
        "whpk_" + SECRET.removeprefix("whsec_"),
        SECRET + "!",
        SECRET + "é",
    ],
)
def test_webhook_secret_of_another_kind_is_refused(secret: str) -> None:
    """Guarantee: an empty or shortened secret raises an error and never signs."""
    with pytest.raises(SecretInvalidError):
        sign([Plaintext(secret)], MESSAGE_ID, AT, BODY)
    with pytest.raises(SecretInvalidError):
        verify(secret, signed(), BODY, AT)


# --- answers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", range(200, 300))
def test_answer_of_2xx_is_a_success(status: int) -> None:
    assert judge_response(status, "60", AT) == DeliveryAssessment(DeliveryOutcome.DELIVERED)


def test_answer_of_410_disables_the_endpoint() -> None:
    assert judge_response(410, None, AT) == DeliveryAssessment(DeliveryOutcome.GONE)


@pytest.mark.parametrize(
    "status", [100, 199, 300, 301, 302, 304, 307, 308, 400, 401, 404, 409, 429, 500, 503, 599, 999]
)
def test_answer_of_anything_else_is_a_failure(status: int) -> None:
    """Guarantee: a redirect is a failure, because its target is not a configured destination."""
    assert judge_response(status, None, AT) == DeliveryAssessment(DeliveryOutcome.RETRY)


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize(
    ("retry_after", "wait"),
    [
        ("120", timedelta(seconds=120)),
        (" 120 ", timedelta(seconds=120)),
        ("0", timedelta()),
        ("999999999", MAX_RETRY_AFTER),
        (format_datetime(AT + timedelta(hours=1), usegmt=True), timedelta(hours=1)),
        (format_datetime(AT - timedelta(hours=1), usegmt=True), timedelta()),
        (format_datetime(AT + timedelta(days=400), usegmt=True), MAX_RETRY_AFTER),
        ("Mon, 01 Mar 2021 00:00:00 -0000", MAX_RETRY_AFTER),
        ("soon", timedelta()),
        ("", timedelta()),
        ("-5", timedelta()),
        ("9" * 400, timedelta()),
    ],
)
def test_answer_with_retry_after_is_honored_within_bounds(status: int, retry_after: str, wait: timedelta) -> None:
    assert judge_response(status, retry_after, AT) == DeliveryAssessment(DeliveryOutcome.RETRY, wait)


@pytest.mark.parametrize("status", [301, 404, 500])
def test_answer_of_another_kind_ignores_retry_after(status: int) -> None:
    assert judge_response(status, "3600", AT) == DeliveryAssessment(DeliveryOutcome.RETRY)


@given(st.sampled_from([429, 503]), st.one_of(st.text(), st.from_regex(r"\w{3}, \d\d \w{3} \d{4,6} [0-9:]{8} .{0,9}")))
def test_answer_with_any_retry_after_is_judged(status: int, retry_after: str) -> None:
    """An endpoint writes what it likes there: it never stops the worker, and never buys more than a day."""
    judgement = judge_response(status, retry_after, AT)
    assert judgement.verdict is DeliveryOutcome.RETRY
    assert timedelta() <= judgement.wait <= MAX_RETRY_AFTER


# --- attempts --------------------------------------------------------------------------------------------------


def test_attempts_continue_for_about_75_hours() -> None:
    pauses = [next_attempt(attempts, lambda: 0.5) for attempts in range(1, MAX_ATTEMPTS + 1)]
    assert pauses[-1] is None
    delays = [pause for pause in pauses if pause is not None]
    assert len(delays) == MAX_ATTEMPTS - 1
    assert sum(delays, timedelta()) == timedelta(hours=75, minutes=35, seconds=5)
    assert delays == sorted(delays)


@given(st.integers(1, MAX_ATTEMPTS - 1), st.floats(0, 1, exclude_max=True))
def test_attempts_have_ten_percent_jitter(attempts: int, random: float) -> None:
    """Endpoints that failed together are not all asked again at the same moment."""
    middle, pause = next_attempt(attempts, lambda: 0.5), next_attempt(attempts, lambda: random)
    assert middle is not None
    assert pause is not None
    assert middle * 0.899 <= pause <= middle * 1.101


@given(st.integers(MAX_ATTEMPTS, 10_000))
def test_attempts_end(attempts: int) -> None:
    assert next_attempt(attempts, lambda: 0.0) is None
