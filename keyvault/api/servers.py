"""Servers of the integration endpoints in this package; rotation adds its own."""

from typing import Any

from rest_framework.response import Response

from keyvault.access.catalog import RECIPIENT_KEY
from keyvault.access.customers import CUSTOMER_ID
from keyvault.access.decision import Denial
from keyvault.access.permissions import Permission
from keyvault.api.integration import Call, EndpointServer, Servers, read_json
from keyvault.api.integration_serializers import CustomerTokenRequest, OrderRequest, RecipientKeyRequest
from keyvault.api.openapi import in_path
from keyvault.api.schemas import (
    CONFIGURATION_BODY,
    CUSTOMER_BODY,
    CUSTOMER_TOKEN_BODY,
    ORDER_BODY,
    OWN_END_BODY,
    RECIPIENT_KEY_BODY,
)
from keyvault.api.serializers import StrictSerializer
from keyvault.domain.canonical import JsonValue
from keyvault.domain.errors import ErrorCode, NotFoundError
from keyvault.domain.keys import KeyKind, KeyState
from keyvault.domain.timestamps import format_timestamp
from keyvault.models import Order
from keyvault.services.idempotency import Effect, StoredResponse
from keyvault.services.keys.lifecycle import get_key, revoke_own_key
from keyvault.services.keys.recipient_keys import set_recipient_key
from keyvault.services.merchants.orders import create_order, find_order
from keyvault.services.tokens.customer_tokens import issue_customer_token, revoke_customer_token
from keyvault.services.verification.judging import Judgement


def _read(form: type[StrictSerializer], call: Call) -> dict[str, Any]:
    """Validate the body with the form. Raises ValidationError with a pointer to each fault."""
    read = form(data=read_json(call.request))
    read.is_valid(raise_exception=True)
    return dict(read.validated_data)


def _create_order(call: Call) -> Effect:
    fields = _read(OrderRequest, call)

    def effect() -> StoredResponse:
        order = create_order(call.grant(Permission.ORDERS_CREATE), call.account, **fields)
        return StoredResponse(201, order_as_json(order))

    return effect


def _retrieve_order(call: Call) -> Response:
    holder = call.holder
    order = find_order(holder.merchant_id, holder.environment, call.variables["order_token"], call.customer)
    return Response(order_as_json(order))


def order_as_json(order: Order) -> dict[str, Any]:
    return {
        "order_token": order.order_token,
        "amount_minor": order.amount_minor,
        "currency": order.currency,
        "customer_id": order.customer_id,
        "created_at": format_timestamp(order.created_at),
    }


def _read_configuration(call: Call) -> Response:
    account = call.account
    return Response(
        {
            "merchant_id": account.merchant_id,
            "environment": account.environment,
            "configuration": account.client_configuration,
        }
    )


def _create_customer_token(call: Call) -> Effect:
    fields = _read(CustomerTokenRequest, call)

    def effect() -> StoredResponse:
        key = get_key(call.holder.key_id)
        if key is None:
            raise NotFoundError
        grant = call.grant(Permission.CUSTOMER_TOKENS_WRITE)
        customer_id = call.variables["customer_id"]
        token, text = issue_customer_token(grant, call.account, key, customer_id=customer_id, **fields)
        body: dict[str, JsonValue] = {
            "token_id": token.token_id,
            "token": None,
            "customer_id": token.customer_id,
            "expires_at": format_timestamp(token.expires_at),
        }
        return StoredResponse(201, body, secret_field="token", secret=text, secret_of=token.token_id)  # noqa: S106  its name

    return effect


def _revoke_customer_token(call: Call) -> Response:
    grant = call.grant(Permission.CUSTOMER_TOKENS_WRITE)
    revoke_customer_token(grant, call.account, call.variables["token_id"])
    return Response(status=204)


def _show_customer(call: Call) -> Response:
    if call.customer is None:
        raise NotFoundError
    return Response(
        {"customer_id": call.customer.customer_id, "expires_at": format_timestamp(call.customer.expires_at)}
    )


def _set_recipient_key(call: Call) -> Response:
    fields = _read(RecipientKeyRequest, call)
    key = get_key(call.holder.key_id)
    if key is None:
        raise NotFoundError
    recipient = set_recipient_key(call.grant(Permission.RECIPIENTS_WRITE), key, fields["recipient_public_key"])
    return Response(
        {
            "credential_id": recipient.credential_id,
            "recipient_public_key": recipient.public_key,
            "applies_at": format_timestamp(recipient.applies_at),
        }
    )


def _revoke_self(call: Call) -> Response:
    key = get_key(call.holder.key_id)
    if key is None:
        raise NotFoundError
    sequence = revoke_own_key(call.grant(Permission.KEYS_REVOKE_SELF), key)
    return Response({"key_id": key.key_id, "state": key.state, "sequence": sequence}, status=202)


def _may_still_revoke(judgement: Judgement) -> bool:
    """Return whether the holder of a refused private key may still revoke it, or repeat its revocation."""
    verdict, record = judgement.verdict, judgement.record
    if not isinstance(verdict, Denial) or record is None or judgement.holder is None:
        return False
    if record.kind is not KeyKind.PRIVATE:
        return False
    if verdict.code is ErrorCode.KEY_NOT_ACTIVE:
        return record.state is KeyState.SUSPENDED
    return verdict.code in {ErrorCode.KEY_REVOKED, ErrorCode.MERCHANT_SUSPENDED}


SERVERS: Servers = {
    "orders.retrieve": EndpointServer(
        description="An order of the key's merchant in this environment. Another merchant's order, another "
        "environment's and, with a Bearer, another customer's order are 404 as if they did not exist.",
        answers=_retrieve_order,
        gives=ORDER_BODY,
        parameters=(in_path("order_token", "^ord_[0-9A-Za-z]{20}$"),),
    ),
    "orders.create": EndpointServer(
        description="Creates an order of `amount_minor` in the currency's minor unit. `currency` is a current ISO "
        "4217 code. A repetition with the same `Idempotency-Key` and body returns the same order.",
        prepares=_create_order,
        status=201,
        takes=OrderRequest,
        gives=ORDER_BODY,
    ),
    "client.configuration": EndpointServer(
        description="What the merchant's browser or app code needs to start. It is the one endpoint for public keys "
        "and answers cross-origin requests of the origins that the account lists.",
        answers=_read_configuration,
        gives=CONFIGURATION_BODY,
    ),
    "customer_tokens.create": EndpointServer(
        description="Issues a token for a customer who signed in at the merchant. The token is in the first response "
        "only; it adds customer context to a private key and never replaces it.",
        prepares=_create_customer_token,
        status=201,
        takes=CustomerTokenRequest,
        gives=CUSTOMER_TOKEN_BODY,
        parameters=(in_path("customer_id", CUSTOMER_ID),),
    ),
    "customer_tokens.revoke": EndpointServer(
        description="Revokes a customer access token of this merchant and environment. Repeatable: up to 10 "
        "repetitions a minute for each private key that issues tokens.",
        answers=_revoke_customer_token,
        status=204,
        codes=[ErrorCode.RATE_LIMITED],
        parameters=(in_path("token_id", "^[0-9A-Za-z]{16}$"),),
    ),
    "customers.me": EndpointServer(
        description="Shows which customer the Bearer token identifies and when it expires. It needs the private key "
        "as well.",
        answers=_show_customer,
        gives=CUSTOMER_BODY,
    ),
    RECIPIENT_KEY: EndpointServer(
        description="Sets the X25519 public key (32 bytes in base64url without padding) to which replacements of this "
        "credential are sealed. Operators are alarmed. In production the key applies 24 hours later, or when two "
        "operators approve it; `applies_at` says when. Rotations requested from then on use it. Repeatable: the same "
        "key again changes nothing. Up to 10 new keys a minute.",
        answers=_set_recipient_key,
        takes=RecipientKeyRequest,
        gives=RECIPIENT_KEY_BODY,
    ),
    "credentials.revoke_self": EndpointServer(
        description="The holder of a leaked private key revokes it, without a sign-in. The response has the sequence "
        "of the revocation. Repeatable, up to 10 times a minute.",
        answers=_revoke_self,
        serves_denied=_may_still_revoke,
        status=202,
        gives=OWN_END_BODY,
        codes=[ErrorCode.RATE_LIMITED],
    ),
}
"""Servers by the endpoint's name."""
