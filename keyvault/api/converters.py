"""What ids in paths look like: anything else names nothing, and never reaches the database."""

from django.urls import register_converter
from django.urls.converters import StringConverter


class KeyIdConverter(StringConverter):
    regex = "[0-9A-Za-z]{16}"


class IssuanceRequestIdConverter(StringConverter):
    regex = "req_[0-9A-Za-z]{20}"


class RotationIdConverter(StringConverter):
    regex = "rot_[0-9A-Za-z]{20}"


class SequenceConverter(StringConverter):
    """Digits; some of them are beyond every sequence, and found to be none."""

    regex = "[0-9]{1,19}"


register_converter(KeyIdConverter, "key_id")
register_converter(IssuanceRequestIdConverter, "issuance_request_id")
register_converter(RotationIdConverter, "rotation_id")
register_converter(SequenceConverter, "sequence")
