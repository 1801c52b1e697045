"""Request bodies and queries. Unknown fields are refused, so that a misspelled one is never silently ignored."""

import re
from collections.abc import Iterable, Mapping
from datetime import UTC
from enum import StrEnum
from typing import Any, NamedTuple

from django.http import QueryDict
from rest_framework import serializers

from keyvault.domain.digests import PepperSet
from keyvault.domain.environments import Environment
from keyvault.domain.free_text import MAX_STORED_LENGTH, clean_text
from keyvault.domain.issuance import MAX_EXPIRES_IN_DAYS, Delivery, IssuanceState
from keyvault.domain.keys import KeyKind
from keyvault.domain.recipient_keys import KEY_CHARACTERS
from keyvault.domain.redaction import redact
from keyvault.domain.revocation import RevocationReason
from keyvault.models import Credential
from keyvault.models.usage import UseOutcome
from keyvault.services.change_feed.readers import MAX_NAME_LENGTH, MAX_USES, ReportedUse, UsageReport
from keyvault.services.change_feed.receipts import MAX_SEQUENCE
from keyvault.services.change_feed.snapshot import MAX_KEYS
from keyvault.services.keys.lifecycle import describe_key


class StrictSerializer(serializers.Serializer[Any]):
    def to_internal_value(self, data: Any) -> Any:
        if isinstance(data, Mapping):
            unknown = sorted(set(map(str, data)) - set(self.fields))
            if unknown:
                raise serializers.ValidationError({name: ["There is no such field."] for name in unknown})
        return super().to_internal_value(data)


class OneOf(serializers.ChoiceField):
    """One value of an enum; the error of any other value lists the accepted ones."""

    def __init__(self, members: Iterable[StrEnum], **options: Any) -> None:
        choices = [member.value for member in members]
        refusal = f'"{{input}}" is none of {", ".join(choices)}.'
        super().__init__(choices, error_messages={"invalid_choice": refusal}, **options)

    def to_internal_value(self, data: Any) -> str:
        """Report a wrong value as `hotpath.messages.requests` does: redacted, since it may be a key."""
        if not isinstance(data, str):
            raise serializers.ValidationError("Not a string.")
        if data not in self.choices:
            self.fail("invalid_choice", input=redact(data.encode(errors="backslashreplace").decode())[:64])
        return data


class StrictInteger(serializers.IntegerField):
    """A JSON integer; strings of digits, booleans and 1.0 are refused."""

    def to_internal_value(self, data: Any) -> int:
        if not isinstance(data, int) or isinstance(data, bool):
            raise serializers.ValidationError("Not an integer.")
        return super().to_internal_value(data)


class StrictBoolean(serializers.BooleanField):
    def to_internal_value(self, data: Any) -> bool:
        if not isinstance(data, bool):
            raise serializers.ValidationError("Not a boolean.")
        return data


class TextForm(NamedTuple):
    """The form of a text. `pattern`: a regular expression for the whole string. `rule`: what to send, for the error."""

    pattern: str
    rule: str


class StrictText(serializers.CharField):
    """A JSON string, not trimmed, without NUL, which PostgreSQL cannot store; numbers are refused."""

    def __init__(self, *, form: TextForm | None = None, **options: Any) -> None:
        if not options.get("allow_blank"):
            options.setdefault("min_length", 1)
        super().__init__(trim_whitespace=False, **options)
        self.form = form

    def to_internal_value(self, data: Any) -> str:
        if not isinstance(data, str):
            raise serializers.ValidationError("Not a string.")
        if self.form is not None and re.fullmatch(self.form.pattern, data) is None:
            raise serializers.ValidationError(self.form.rule)
        return super().to_internal_value(data)


class RevokeRequest(StrictSerializer):
    reason = OneOf(RevocationReason)


class QuerySerializer(StrictSerializer):
    """Query parameters; a repeated one is refused."""

    def to_internal_value(self, data: QueryDict) -> Any:
        repeated = sorted(name for name, values in data.lists() if len(values) > 1)
        if repeated:
            raise serializers.ValidationError({name: ["The parameter is repeated. Send it once."] for name in repeated})
        return super().to_internal_value(data.dict())


class QueryInteger(serializers.IntegerField):
    """Up to 9 ASCII digits; other forms that Python parses as a number are refused."""

    def to_internal_value(self, data: Any) -> int:
        if re.fullmatch("[0-9]{1,9}", data) is None:
            raise serializers.ValidationError("Not a whole number of at most 9 digits.")
        return super().to_internal_value(data)


class PageQuery(QuerySerializer):
    """One page of a list. `cursor`: the `next_cursor` of the page before; `api.pages` reads it."""

    merchant = StrictText(
        required=False,
        max_length=64,
        help_text="Rows of this merchant only; a merchant outside the token's merchants is 404.",
    )
    environment = OneOf(Environment, required=False, help_text="Rows of this environment only.")
    cursor = StrictText(
        required=False,
        form=TextForm(r"[0-9]{1,16}\.[a-z]{3}_[0-9A-Za-z]{20}", "Use the `next_cursor` of the page before."),
        help_text="`next_cursor` of the page before.",
    )
    limit = QueryInteger(
        required=False, min_value=1, max_value=200, default=50, help_text="Maximum number of rows of the page."
    )


class CredentialQuery(PageQuery):
    kind = OneOf(KeyKind, required=False, help_text="Credentials of this kind only.")


class IssuanceQuery(PageQuery):
    state = OneOf(IssuanceState, required=False, help_text="Requests in this state only.")


class CredentialRequest(StrictSerializer):
    """The service validates `label` and the requirements of `delivery`."""

    merchant = StrictText(max_length=64)
    environment = OneOf(Environment)
    kind = OneOf(KeyKind)
    label = StrictText(required=False, max_length=100)  # type: ignore[assignment]  # DRF takes fields off the class
    delivery = OneOf(Delivery, required=False)
    expires_in_days = StrictInteger(required=False, min_value=1, max_value=MAX_EXPIRES_IN_DAYS)
    recipient_public_key = StrictText(required=False, max_length=KEY_CHARACTERS)


_READER = TextForm(
    rf"[A-Za-z0-9._-]{{1,{MAX_NAME_LENGTH}}}",
    f"Use 1 to {MAX_NAME_LENGTH} characters of A-Z, a-z, 0-9, '.', '_' and '-'.",
)


def _id_list(ids: str) -> TextForm:
    """Return the form of a list of key ids or token ids."""
    rule = f"Use 1 to {MAX_KEYS} {ids}, of 16 letters and digits each, separated by commas."
    return TextForm(rf"[0-9A-Za-z]{{16}}(,[0-9A-Za-z]{{16}}){{0,{MAX_KEYS - 1}}}", rule)


class ChangesQuery(QuerySerializer):
    reader = StrictText(
        form=_READER, max_length=MAX_NAME_LENGTH, help_text="Name of the reading process; a new one at each start."
    )
    after = StrictText(
        required=False,
        form=TextForm("[0-9]{1,18}", "Use the `sequence` of the previous response, or omit it."),
        help_text="`sequence` of the previous response. Omit it to start with an empty memory.",
    )
    wait = QueryInteger(
        required=False, min_value=0, max_value=20, default=0, help_text="Maximum wait for the next change, in seconds."
    )


class ConfirmationRequest(StrictSerializer):
    reader = StrictText(form=_READER, max_length=MAX_NAME_LENGTH)
    sequence = StrictInteger(min_value=0, max_value=MAX_SEQUENCE)


class SnapshotKeysQuery(QuerySerializer):
    key_ids = StrictText(
        form=_id_list("key ids"),
        help_text=f"1 to {MAX_KEYS} key ids, separated by commas.",
    )


class SnapshotTokensQuery(QuerySerializer):
    token_ids = StrictText(
        form=_id_list("token ids"),
        help_text=f"1 to {MAX_KEYS} token ids, separated by commas.",
    )


class ReportedUseRequest(StrictSerializer):
    """The uses of one key by one client, in one minute, with one outcome."""

    key_id = StrictText(max_length=16)
    endpoint = StrictText(max_length=100, allow_blank=True)
    source = StrictText(max_length=64, allow_blank=True)  # type: ignore[assignment]  # DRF takes fields off the class
    user_agent = StrictText(required=False, default="", max_length=MAX_STORED_LENGTH, allow_blank=True)
    origin = StrictText(required=False, default="", max_length=MAX_STORED_LENGTH, allow_blank=True)
    outcome = OneOf(
        UseOutcome,
        help_text="A token without `keys:replicate_digests` reports `allowed`, `denied` and `refused` only.",
    )
    count = StrictInteger(min_value=1, max_value=1_000_000_000)
    first_at = serializers.DateTimeField(default_timezone=UTC)
    last_at = serializers.DateTimeField(default_timezone=UTC)


class UsageReportRequest(StrictSerializer):
    reader = StrictText(form=_READER, max_length=MAX_NAME_LENGTH)
    number = StrictInteger(min_value=1, max_value=MAX_SEQUENCE)
    flushed_through = serializers.DateTimeField(default_timezone=UTC)
    is_final = StrictBoolean(required=False, default=False)
    uses = serializers.ListField(child=ReportedUseRequest(), max_length=MAX_USES)
    peppers = serializers.DictField(
        child=StrictInteger(min_value=0, max_value=2**31 - 1),
        required=False,
        help_text="For a regional verifier: the newest version that it has loaded of each pepper set.",
    )

    def report(self) -> UsageReport:
        fields = self.validated_data
        return UsageReport(
            number=fields["number"],
            flushed_through=fields["flushed_through"],
            uses=[_reported_use(use) for use in fields["uses"]],
            peppers={name: version for name, version in fields.get("peppers", {}).items() if name in set(PepperSet)},
            is_final=fields["is_final"],
        )


def _reported_use(fields: Mapping[str, Any]) -> ReportedUse:
    """Return the use, with secrets in its texts redacted as on the request path."""
    lengths = {"endpoint": 100, "source": 64, "user_agent": MAX_STORED_LENGTH, "origin": MAX_STORED_LENGTH}
    texts = {name: clean_text(fields[name], length) for name, length in lengths.items()}
    return ReportedUse(
        key_id=fields["key_id"],
        outcome=UseOutcome(fields["outcome"]),
        count=fields["count"],
        first_at=fields["first_at"],
        last_at=fields["last_at"],
        **texts,
    )


class CollectRequest(StrictSerializer):
    """An empty object: the path names the issuance request."""


def credential_as_json(credential: Credential) -> dict[str, Any]:
    return {
        "credential_id": credential.credential_id,
        "merchant_id": credential.account.merchant_id,
        "environment": credential.account.environment,
        "kind": credential.kind,
        "label": credential.label,
        "delivery": credential.delivery,
        "created_at": credential.created_at,
        "keys": [describe_key(key) for key in sorted(credential.keys.all(), key=lambda key: key.created_at)],
    }
