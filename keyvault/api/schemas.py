"""Bodies that the OpenAPI page documents and no serializer parses; a test checks a live server against them."""

from keyvault.access.catalog import Bearer, LimiterFailurePolicy
from keyvault.access.limits import MAX_COUNT
from keyvault.api.openapi_components import (
    ANY_OBJECT,
    FLAG,
    INSTANT,
    INTEGER,
    TEXT,
    Schema,
    define,
    list_of,
    nullable,
    obj,
    one_of,
    reference,
)
from keyvault.api.openapi_examples import KEY
from keyvault.domain.digests import PepperSet
from keyvault.domain.environments import Environment
from keyvault.domain.errors import ErrorCode
from keyvault.domain.issuance import Delivery, IssuanceState
from keyvault.domain.keys import KeyKind, KeyState, RetirementReason
from keyvault.domain.revocation import RevocationReason
from keyvault.services.change_feed.receipts import MAX_STOPPED, VerifierProgress

_COUNT: Schema = {"type": "integer", "minimum": 0}

HEALTH_BODY = define("HealthBody", obj(status=one_of(["ok"])))

READINESS_BODY = define(
    "ReadinessBody",
    obj(
        "`checks` maps each dependency to `ok` or `failing`. A failing `disk` leaves the process ready.",
        status=one_of(["ready", "not_ready"]),
        checks={"type": "object", "additionalProperties": one_of(["ok", "failing"])},
    ),
)

# --- keys -------------------------------------------------------------------------------------------------

KEY_BODY = define(
    "KeyBody",
    obj(
        "A key's state, never its material.",
        key_id=TEXT,
        state=one_of(KeyState),
        kind=one_of(KeyKind),
        credential_id=TEXT,
        merchant_id=TEXT,
        environment=one_of(Environment),
        created_at=INSTANT,
        activated_at=nullable(INSTANT),
        expires_at=nullable(INSTANT),
        first_used_at=nullable(INSTANT),
        last_used_at=nullable(INSTANT),
        retirement=nullable(one_of(RetirementReason)),
        reason=nullable(one_of(RevocationReason)),
    ),
)

CREDENTIAL_BODY = define(
    "CredentialBody",
    obj(
        credential_id=TEXT,
        merchant_id=TEXT,
        environment=one_of(Environment),
        kind=one_of(KeyKind),
        label=TEXT,
        delivery=one_of(Delivery),
        created_at=INSTANT,
        keys=list_of(KEY_BODY),
    ),
)

CREDENTIALS_BODY = define("CredentialsBody", obj(credentials=list_of(CREDENTIAL_BODY), next_cursor=nullable(TEXT)))

_VERIFIER_BODY = define(
    "VerifierBody",
    obj(
        "A verifier's progress; times are by the database's clock.\n\n`expired`: it has not reported within its "
        "staleness bound. It no longer answers from memory, and receipts do not wait for it.",
        verifier_id=TEXT,
        door=TEXT,
        state=one_of(VerifierProgress),
        confirmed_at=nullable(INSTANT),
        seen_at=INSTANT,
    ),
)

RECEIPT_BODY = define(
    "ReceiptBody",
    obj(
        "Which verifiers have applied a change. `complete`: none is pending. `verifiers`: those that run, and of the "
        f"latest {MAX_STOPPED} that have deregistered those that had applied it.",
        sequence=INTEGER,
        complete=FLAG,
        changed_at=nullable(INSTANT),
        verifiers=list_of(_VERIFIER_BODY),
    ),
)

REVOKED_BODY = define(
    "RevokedBody",
    obj(
        "`receipt` is present when the request has `Prefer: wait`.",
        key_id=TEXT,
        state=one_of(KeyState),
        sequence=INTEGER,
        optional={"receipt": RECEIPT_BODY},
    ),
)

# --- the catalog ------------------------------------------------------------------------------------------

_ENDPOINT_LIMIT_BODY = define("EndpointLimitBody", obj(count=INTEGER, seconds=INTEGER))

_ENDPOINT_BODY = define(
    "EndpointBody",
    obj(
        "An endpoint of the catalog. `authorization` is its authorization panel: what it requires of a caller.",
        name=TEXT,
        method=TEXT,
        path={**TEXT, "examples": ["/merchants/orders"]},
        credential=TEXT,
        credentials=list_of(one_of(KeyKind)),
        bearer=one_of(Bearer),
        merchant_from=nullable(TEXT),
        store_from=nullable(TEXT),
        idempotency_key=FLAG,
        limit=nullable(_ENDPOINT_LIMIT_BODY),
        on_limiter_loss=one_of(LimiterFailurePolicy),
        built_in=FLAG,
        summary=TEXT,
        authorization={"type": "object", "additionalProperties": TEXT},
    ),
)

ENDPOINTS_BODY = define("EndpointsBody", obj(endpoints=list_of(_ENDPOINT_BODY)))

# --- verification -----------------------------------------------------------------------------------------


def _text(most: int, least: int = 1) -> Schema:
    """Return the schema of a text without NUL, with its maximum and minimum length in characters."""
    return {**TEXT, "pattern": r"^[^\u0000]*$", "maxLength": most, **({"minLength": least} if least else {})}


VERIFY_REQUEST_BODY = define(
    "VerifyRequestBody",
    {
        **obj(
            "A request names its endpoint either by `endpoint` or by `method` and `path`.",
            key=nullable(TEXT),
            environment=one_of(Environment),
            optional={
                "endpoint": _text(100),
                "method": {**TEXT, "pattern": "^[A-Z]{1,16}$"},
                "path": _text(8192),
                "merchant": nullable(_text(64)),
                "store": nullable(_text(128)),
                "customer_token": nullable(TEXT),
                "client_ip": {**nullable(_text(64)), "anyOf": [{"format": "ipv4"}, {"format": "ipv6"}]},
                "origin": nullable(_text(500, least=0)),
                "user_agent": nullable(_text(8192, least=0)),
                "cost": {"type": "integer", "minimum": 1, "maximum": MAX_COUNT},
                "dry_run": FLAG,
            },
        ),
        "examples": [{"key": KEY, "environment": "sandbox", "endpoint": "orders.create", "client_ip": "192.0.2.1"}],
        "oneOf": [
            {"required": ["endpoint"], "properties": {"method": False, "path": False}},
            {"required": ["method", "path"], "properties": {"endpoint": False}},
        ],
    },
)

VERIFY_BATCH_REQUEST_BODY = define(
    "VerifyBatchRequestBody", obj(requests={**list_of(VERIFY_REQUEST_BODY), "minItems": 1, "maxItems": 100})
)

_LIMIT_BODY = define("LimitBody", obj(policy=one_of(["account", "endpoint"]), remaining=_COUNT, reset_seconds=_COUNT))

_CHECK_BODY = define("CheckBody", obj(rule=TEXT, passed=FLAG))

DECISION_BODY = define(
    "DecisionBody",
    obj(
        "The response to send to the client.\n\nFields that identify the key are present only when its possession is "
        "proved, `trace` only in a dry run.",
        allowed=FLAG,
        status=INTEGER,
        code=nullable(one_of(ErrorCode)),
        check=nullable(INTEGER),
        headers={"type": "object", "additionalProperties": TEXT},
        request_id=TEXT,
        optional={
            "problem": reference("Problem"),
            "key_id": TEXT,
            "credential_id": TEXT,
            "kind": one_of(KeyKind),
            "merchant_id": TEXT,
            "environment": one_of(Environment),
            "customer_id": nullable(TEXT),
            "limit": _LIMIT_BODY,
            "trace": list_of(_CHECK_BODY),
        },
    ),
)

DECISIONS_BODY = define("DecisionsBody", obj(decisions=list_of(DECISION_BODY)))

# --- issuance ---------------------------------------------------------------------------------------------

ISSUANCE_REQUEST_BODY = define(
    "IssuanceRequestBody",
    obj(
        issuance_request_id=TEXT,
        state=one_of(IssuanceState),
        merchant_id=TEXT,
        environment=one_of(Environment),
        kind=one_of(KeyKind),
        label=TEXT,
        delivery=one_of(Delivery),
        created_at=INSTANT,
        expires_at=INSTANT,
        approvals_needed=INTEGER,
        credential_id=nullable(TEXT),
        key_id=nullable(TEXT),
        optional={"recipient_public_key": TEXT},
    ),
)

ISSUANCE_REQUESTS_BODY = define(
    "IssuanceRequestsBody",
    obj(issuance_requests=list_of(ISSUANCE_REQUEST_BODY), next_cursor=nullable(TEXT)),
)

SEALED_BODY = define(
    "SealedBody", obj("HPKE (RFC 9180) in base mode, base64url.", suite=TEXT, enc=TEXT, ciphertext=TEXT)
)

COLLECTED_BODY = define(
    "CollectedBody",
    obj(
        "The key, once: in plain text, or sealed to the recipient's public key.\n\nWhen a replay can no longer show "
        "it, `key` is null and `secret_available` false.",
        issuance_request_id=TEXT,
        credential_id=TEXT,
        key_id=TEXT,
        optional={"key": nullable(TEXT), "sealed": SEALED_BODY, "secret_available": FLAG},
    ),
)

# --- the change feed ----------------------------------------------------------------------------------------

_KEY_RECORD_BODY = define(
    "KeyRecordBody",
    obj(
        "What a verdict depends on. `digest`, its pepper version and the account's numbers are for regional verifiers.",
        key_id=TEXT,
        credential_id=TEXT,
        kind=one_of(KeyKind),
        environment=one_of(Environment),
        merchant_id=TEXT,
        state=one_of(KeyState),
        retirement=nullable(one_of(RetirementReason)),
        expires_at=nullable(INSTANT),
        merchant_active=FLAG,
        account_active=FLAG,
        origin_header=one_of(["refuse", "report"]),
        networks=list_of(TEXT),
        limit=nullable(_ENDPOINT_LIMIT_BODY),
        optional={"digest": TEXT, "pepper_version": INTEGER, "account_id": INTEGER, "account_version": INTEGER},
    ),
)

_CHANGE_BODY = define(
    "ChangeBody",
    obj(
        "A changed subject. `kind`: key, credential, account, merchant, limit, endpoint, customer_token or "
        "service_token; for any other kind drop everything. `record`: the current record, if the kind is key.",
        sequence=INTEGER,
        kind=TEXT,
        id=TEXT,
        record=nullable(_KEY_RECORD_BODY),
    ),
)

CHANGES_BODY = define(
    "ChangesBody",
    obj(
        reader_id=TEXT,
        sequence=INTEGER,
        waited_seconds={"type": "number", "minimum": 0},
        staleness_seconds=INTEGER,
        changes=list_of(_CHANGE_BODY),
    ),
)

CONFIRMED_BODY = define("ConfirmedBody", obj(reader_id=TEXT, sequence=INTEGER))
USAGE_REPORTED_BODY = define("UsageReportedBody", obj(reader_id=TEXT, number=INTEGER))
SNAPSHOT_KEYS_BODY = define("SnapshotKeysBody", obj(keys=list_of(_KEY_RECORD_BODY)))

_DIGEST = {"digest": TEXT, "pepper_version": INTEGER}

SNAPSHOT_TOKENS_BODY = define(
    "SnapshotTokensBody",
    obj(
        tokens=list_of(
            define(
                "TokenRecordBody",
                obj(
                    token_id=TEXT,
                    name=TEXT,
                    person=TEXT,
                    permissions=list_of(TEXT),
                    scope=obj(merchants=nullable(list_of(TEXT)), environments=list_of(one_of(Environment))),
                    lineage=TEXT,
                    is_probe=FLAG,
                    expires_at=INSTANT,
                    revoked_at=nullable(INSTANT),
                    **_DIGEST,
                ),
            )
        )
    ),
)

SNAPSHOT_CUSTOMERS_BODY = define(
    "SnapshotCustomersBody",
    obj(
        customers=list_of(
            define(
                "CustomerRecordBody",
                obj(
                    token_id=TEXT,
                    environment=one_of(Environment),
                    merchant_id=TEXT,
                    customer_id=TEXT,
                    expires_at=INSTANT,
                    revoked_at=nullable(INSTANT),
                    **_DIGEST,
                ),
            )
        )
    ),
)

SNAPSHOT_PEPPERS_BODY = define(
    "SnapshotPeppersBody",
    obj(
        peppers=list_of(
            define(
                "PepperVersionBody",
                obj(
                    pepper_set=one_of(PepperSet),
                    number=INTEGER,
                    check_value=TEXT,
                    created_at=INSTANT,
                    hashes_from_at=nullable(INSTANT),
                    retired_at=nullable(INSTANT),
                ),
            )
        )
    ),
)

RULES_BODY = define(
    "RulesBody",
    obj(
        endpoints=list_of(_ENDPOINT_BODY),
        limits=obj(
            default={"type": "object", "additionalProperties": _ENDPOINT_LIMIT_BODY},
            overrides=list_of(
                define(
                    "LimitOverrideBody",
                    obj(
                        "An endpoint's limit for one merchant's account, or for all accounts if `merchant_id` is null.",
                        merchant_id=nullable(TEXT),
                        environment=one_of(Environment),
                        endpoint=TEXT,
                        limit=_ENDPOINT_LIMIT_BODY,
                        setting=TEXT,
                        account_id=nullable(INTEGER),
                    ),
                )
            ),
        ),
    ),
)

# --- the integration plane --------------------------------------------------------------------------------

ORDER_BODY = define(
    "OrderBody",
    obj(order_token=TEXT, amount_minor=INTEGER, currency=TEXT, customer_id=nullable(TEXT), created_at=INSTANT),
)

CONFIGURATION_BODY = define(
    "ConfigurationBody", obj(merchant_id=TEXT, environment=one_of(Environment), configuration=ANY_OBJECT)
)

CUSTOMER_TOKEN_BODY = define(
    "CustomerTokenBody",
    obj(
        "When a replay can no longer show the token, `token` is null and `secret_available` false.",
        token_id=TEXT,
        token=nullable(TEXT),
        customer_id=TEXT,
        expires_at=INSTANT,
        optional={"secret_available": FLAG},
    ),
)

CUSTOMER_BODY = define("CustomerBody", obj(customer_id=TEXT, expires_at=INSTANT))

OWN_END_BODY = define("OwnEndBody", obj(key_id=TEXT, state=one_of(KeyState), sequence=INTEGER))

RECIPIENT_KEY_BODY = define(
    "RecipientKeyBody",
    obj(
        "The recipient key. Rotations requested from `applies_at` on use it.",
        credential_id=TEXT,
        recipient_public_key=TEXT,
        applies_at=INSTANT,
    ),
)
