"""Path converters for ids. A value of any other form is 404 and never reaches the database."""

from django.urls import register_converter
from django.urls.converters import StringConverter


class KeyIdConverter(StringConverter):
    regex = "[0-9A-Za-z]{16}"


class CredentialIdConverter(StringConverter):
    regex = "crd_[0-9A-Za-z]{20}"


class IssuanceRequestIdConverter(StringConverter):
    regex = "req_[0-9A-Za-z]{20}"


class SequenceConverter(StringConverter):
    """Up to 19 digits; the view answers 404 for a number beyond the largest sequence."""

    regex = "[0-9]{1,19}"


register_converter(KeyIdConverter, "key_id")
register_converter(CredentialIdConverter, "credential_id")
register_converter(IssuanceRequestIdConverter, "issuance_request_id")
register_converter(SequenceConverter, "sequence")
