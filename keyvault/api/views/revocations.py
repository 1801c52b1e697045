"""The receipt of a change: which verifiers have confirmed it."""

import re

from rest_framework.request import Request
from rest_framework.response import Response

from keyvault.access.permissions import Permission
from keyvault.api.enforcement import ServiceView
from keyvault.api.openapi import documented, in_path
from keyvault.api.schemas import RECEIPT_BODY
from keyvault.domain.errors import NotFoundError
from keyvault.services.change_feed.receipts import describe_receipt, find_account_of, find_receipt

_SEQUENCE = "[0-9]{1,19}"
"""Pattern of a sequence in a path. `int` would also accept other spellings, and fail on thousands of digits."""


class RevocationView(ServiceView):
    permission = Permission.KEYS_READ

    @documented(
        "revocations_read",
        summary="Read which verifiers have confirmed a revocation.",
        description="`complete` is true once every live verifier has applied the change with this sequence number. "
        "Also available for any other change. A change of an account outside the token's scope is 404.",
        permission=Permission.KEYS_READ,
        answers={200: RECEIPT_BODY},
        parameters=[in_path("sequence", f"^{_SEQUENCE}$")],
    )
    def get(self, request: Request, sequence: str) -> Response:
        receipt = find_receipt(int(sequence)) if re.fullmatch(_SEQUENCE, sequence) else None
        if receipt is None:
            raise NotFoundError
        account = find_account_of(receipt.subject)
        if account is not None:
            self.grant_for(account)
        elif self.service.scope.merchants is not None:
            raise NotFoundError
        return Response(describe_receipt(receipt))
