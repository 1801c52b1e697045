"""The change feed over HTTP: read and confirm changes, report uses, and read the records and rules to decide with."""

from rest_framework.request import Request
from rest_framework.response import Response

from keyvault.access.permissions import Permission
from keyvault.api.enforcement import ServiceView
from keyvault.api.middleware import FEED_WAIT
from keyvault.api.openapi import documented
from keyvault.api.schemas import (
    CHANGES_BODY,
    CONFIRMED_BODY,
    RULES_BODY,
    SNAPSHOT_CUSTOMERS_BODY,
    SNAPSHOT_KEYS_BODY,
    SNAPSHOT_PEPPERS_BODY,
    SNAPSHOT_TOKENS_BODY,
    USAGE_REPORTED_BODY,
)
from keyvault.api.serializers import (
    ChangesQuery,
    ConfirmationRequest,
    SnapshotKeysQuery,
    SnapshotTokensQuery,
    UsageReportRequest,
)
from keyvault.domain.errors import ErrorCode
from keyvault.services.change_feed.readers import ReadChanges, confirm_changes, read_changes, report_usage
from keyvault.services.change_feed.snapshot import (
    describe_customers,
    describe_pepper_versions,
    describe_records,
    describe_rules,
    describe_tokens,
)

_READER_CODES = (ErrorCode.CURSOR_EXPIRED, ErrorCode.STATE_CONFLICT)


class ChangesView(ServiceView):
    permission = Permission.KEYS_REPLICATE

    @documented(
        "changes_list",
        summary="Read the change feed by long polling.",
        description="For a verifier that answers from memory. `reader` names one process; without `after` it is "
        "registered, with an empty memory. Apply every change, read on with `after` = `sequence`, and confirm that "
        "sequence. Some changes are repeated; apply them again. Use the memory until `staleness_seconds` plus "
        "`waited_seconds` after you sent this request. Receipts wait for a reader as for any verifier, and so do the "
        "acceptance and the silence of rotations. 410 `cursor_expired`: drop the memory and start without `after`. A "
        "reader that does not confirm within its staleness gets 410, also without `after` while receipts wait for it.",
        permission=Permission.KEYS_REPLICATE,
        answers={200: CHANGES_BODY},
        codes=_READER_CODES,
        parameters=[ChangesQuery],
    )
    def get(self, request: Request) -> Response:
        form = ChangesQuery(data=request.query_params)
        form.is_valid(raise_exception=True)
        query = form.validated_data
        after = query.get("after")
        read = read_changes(self.service, query["reader"], None if after is None else int(after), self.now)
        waiting = request._request.META.get(FEED_WAIT)
        if waiting is not None and after is not None and not read.rows and read.sequence == int(after):
            waiting.wanted_seconds = min(query["wait"], read.staleness_seconds / 2)
        waited_seconds = 0.0 if waiting is None else waiting.waited_seconds
        return Response(self._body(read, waited_seconds))

    def _body(self, read: ReadChanges, waited_seconds: float) -> dict[str, object]:
        ids = {identity for kind, identity in (row.subject for row in read.rows) if kind == "key"}
        has_digests = Permission.KEYS_REPLICATE_DIGESTS in self.service.permissions
        records = {each["key_id"]: each for each in describe_records(self.service, ids, has_digests=has_digests)}
        return {
            "reader_id": read.reader_id,
            "sequence": read.sequence,
            "waited_seconds": round(waited_seconds, 3),
            "staleness_seconds": read.staleness_seconds,
            "changes": [
                {
                    "sequence": row.sequence,
                    "kind": row.subject[0],
                    "id": row.subject[1],
                    "record": records.get(row.subject[1]) if row.subject[0] == "key" else None,
                }
                for row in read.rows
            ],
        }


class ConfirmationsView(ServiceView):
    permission = Permission.KEYS_REPLICATE

    @documented(
        "changes_confirm",
        summary="Confirm that every change up to a sequence is applied.",
        description="`sequence` is one that `GET /v1/changes` returned to this reader. From then on the reader's "
        "decisions reflect every change up to it, and receipts say so. Repeatable.",
        permission=Permission.KEYS_REPLICATE,
        takes=ConfirmationRequest,
        answers={200: CONFIRMED_BODY},
        codes=_READER_CODES,
    )
    def post(self, request: Request) -> Response:
        form = ConfirmationRequest(data=request.data)
        form.is_valid(raise_exception=True)
        fields = form.validated_data
        reader_id = confirm_changes(self.service, fields["reader"], fields["sequence"], self.now)
        return Response({"reader_id": reader_id, "sequence": fields["sequence"]})


class UsageReportsView(ServiceView):
    permission = Permission.KEYS_REPLICATE

    @documented(
        "usage_reports_create",
        summary="Report the uses of keys that a reader decided from memory.",
        description="Every use up to `flushed_through` is in this report or an earlier one, so that a rotation never "
        "takes missing reports for silence. `number` starts at 1 and grows by one; a repeated number adds nothing. "
        "Report every second or two, also without uses: after 10 seconds the reader counts as lost, and silence starts "
        "again. `is_final` deregisters the reader.",
        permission=Permission.KEYS_REPLICATE,
        takes=UsageReportRequest,
        answers={200: USAGE_REPORTED_BODY},
        codes=_READER_CODES,
    )
    def post(self, request: Request) -> Response:
        form = UsageReportRequest(data=request.data)
        form.is_valid(raise_exception=True)
        name, report = form.validated_data["reader"], form.report()
        return Response({"reader_id": report_usage(self.service, name, report, self.now), "number": report.number})


class SnapshotView(ServiceView):
    permission = Permission.KEYS_REPLICATE

    @documented(
        "snapshot_read",
        summary="Read the endpoints' rules and the limits.",
        description="What a verifier needs in addition to the keys' records. Read it again after a change of the kind "
        "`endpoint` or `limit`.",
        permission=Permission.KEYS_REPLICATE,
        answers={200: RULES_BODY},
    )
    def get(self, request: Request) -> Response:
        return Response(describe_rules(self.service))


class SnapshotKeysView(ServiceView):
    permission = Permission.KEYS_REPLICATE

    @documented(
        "snapshot_keys_read",
        summary="Read the records of keys.",
        description="The states and restrictions of up to 100 keys. Unknown keys, and keys outside the token's scope, "
        "are absent. Records have digests only for a token with `keys:replicate_digests`, whose reader has peppers of "
        "its own.",
        permission=Permission.KEYS_REPLICATE,
        answers={200: SNAPSHOT_KEYS_BODY},
        parameters=[SnapshotKeysQuery],
    )
    def get(self, request: Request) -> Response:
        form = SnapshotKeysQuery(data=request.query_params)
        form.is_valid(raise_exception=True)
        has_digests = Permission.KEYS_REPLICATE_DIGESTS in self.service.permissions
        ids = frozenset(form.validated_data["key_ids"].split(","))
        return Response({"keys": describe_records(self.service, ids, has_digests=has_digests)})


class SnapshotTokensView(ServiceView):
    permission = Permission.KEYS_REPLICATE_DIGESTS

    @documented(
        "snapshot_tokens_read",
        summary="Read the records of service tokens, for a regional verifier.",
        description="Tokens whose environments and merchants are within the calling token's, with their digests. Other "
        "tokens are absent. `keys:verify` is the only permission that is listed.",
        permission=Permission.KEYS_REPLICATE_DIGESTS,
        answers={200: SNAPSHOT_TOKENS_BODY},
        parameters=[SnapshotTokensQuery],
    )
    def get(self, request: Request) -> Response:
        return Response({"tokens": describe_tokens(self.service, _token_ids(request))})


class SnapshotCustomersView(ServiceView):
    permission = Permission.KEYS_REPLICATE_DIGESTS

    @documented(
        "snapshot_customers_read",
        summary="Read the records of customer access tokens, for a regional verifier.",
        description="Customer access tokens within this token's scope, with their digests. Others are absent.",
        permission=Permission.KEYS_REPLICATE_DIGESTS,
        answers={200: SNAPSHOT_CUSTOMERS_BODY},
        parameters=[SnapshotTokensQuery],
    )
    def get(self, request: Request) -> Response:
        return Response({"customers": describe_customers(self.service, _token_ids(request))})


class SnapshotPeppersView(ServiceView):
    permission = Permission.KEYS_REPLICATE_DIGESTS

    @documented(
        "snapshot_peppers_read",
        summary="Read which pepper versions exist, for a regional verifier.",
        description="The versions with their check values. The peppers themselves are in the region's own Vault and "
        "never in a response.",
        permission=Permission.KEYS_REPLICATE_DIGESTS,
        answers={200: SNAPSHOT_PEPPERS_BODY},
    )
    def get(self, request: Request) -> Response:
        return Response({"peppers": describe_pepper_versions(self.service)})


def _token_ids(request: Request) -> frozenset[str]:
    form = SnapshotTokensQuery(data=request.query_params)
    form.is_valid(raise_exception=True)
    return frozenset(form.validated_data["token_ids"].split(","))
