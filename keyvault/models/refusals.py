"""Refused requests, for support by request id. Stored for a limited time, never part of a verdict."""

from django.db import models

from keyvault.domain.environments import Environment
from keyvault.models.columns import choice, choices_check
from keyvault.wire.entry_points import VerificationEntryPoint


class Refusal(models.Model):
    """One denied request for an endpoint. `key_id` and `merchant_id` are set only when possession was proved.

    `trace`: the list of applied rules, each `[code, passed]`.
    """

    request_id = models.CharField(primary_key=True, max_length=32)
    at = models.DateTimeField(db_index=True)
    entry_point = choice(VerificationEntryPoint, db_column="door")  # the name that version 0.2.0 knows
    environment = choice(Environment)
    endpoint = models.CharField(max_length=100, blank=True)
    code = models.CharField(max_length=64)
    detail = models.CharField(max_length=300)
    internal = models.CharField(max_length=300, blank=True)
    key_id = models.CharField(max_length=16, blank=True)
    merchant_id = models.CharField(max_length=64, blank=True)
    source = models.CharField(max_length=64, blank=True)
    trace = models.JSONField(default=list)

    class Meta:
        constraints = [
            choices_check("refusal_door", "entry_point", VerificationEntryPoint),
            choices_check("refusal_environment", "environment", Environment),
        ]
        indexes = [
            models.Index(fields=["environment", "-at", "-request_id"], name="refusal_by_env"),
            models.Index(fields=["at"], name="refusal_unproved", condition=models.Q(key_id="")),
            models.Index(fields=["key_id"], name="refusal_by_key", condition=~models.Q(key_id="")),
            models.Index(
                fields=["merchant_id", "environment", "-at", "-request_id"],
                name="refusal_of_account",
                condition=~models.Q(merchant_id=""),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.request_id}: {self.code}"
