"""Request, approve and issue a credential in one run, through the same services as the console."""

from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandParser

from keyvault.access.permissions import Permission
from keyvault.domain.errors import DependencyUnavailableError, StateConflictError
from keyvault.domain.issuance import Delivery, IssuanceState
from keyvault.domain.keys import KeyKind
from keyvault.management.mixins import AccountMixin, ApprovalMixin, add_reveal_option
from keyvault.services.issuance import requests
from keyvault.services.maintenance import issue_one


class Command(AccountMixin, ApprovalMixin):
    help = (
        "Issue a new credential with its first key. If the environment's policy requires a second person, "
        "--approved-by must name one. In production an approval on the command line is break-glass: two persons "
        "review it in the console, and the approver can be one of them."
    )

    def add_options(self, parser: CommandParser) -> None:
        super().add_options(parser)
        parser.add_argument("--kind", required=True, choices=[kind.value for kind in KeyKind])
        parser.add_argument("--label", default="command line")
        parser.add_argument(
            "--delivery",
            choices=[
                each.value for each in Delivery if each is not Delivery.SEALED
            ],  # only services request sealed keys
            default=Delivery.SECRET_BACKEND.value,
        )
        parser.add_argument("--expires-in-days", type=int)
        add_reveal_option(parser, "collect the key and print it once")

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        account = self.account(options)
        requester = self.requester(options)
        request = requests.request_issuance(
            self.grant(requester, Permission.ISSUANCE_REQUEST, account),
            account,
            kind=KeyKind(options["kind"]),
            label=options["label"],
            delivery=Delivery(options["delivery"]),
            expires_in_days=options["expires_in_days"],
        )
        if request.state == IssuanceState.PENDING:
            self._approve(request, options["approved_by"])
        issue_one(request)
        issued = requests.get_request(request.issuance_request_id)
        if issued is None or issued.key is None:
            raise DependencyUnavailableError(
                f"The key is not issued yet; the worker continues {request.issuance_request_id}."
            )
        answer: dict[str, Any] = {
            "issuance_request_id": issued.issuance_request_id,
            "credential_id": issued.key.credential_id,
            "key_id": issued.key.key_id,
        }
        if options["reveal"]:
            grant = self.grant(requester, Permission.ISSUANCE_COLLECT, account)
            answer["key"] = requests.collect_key(grant, issued).reveal()
        return answer

    def _approve(self, request: Any, approver_name: str | None) -> None:
        """Approve the request. When that is refused, withdraw it, so that no operator approves it by mistake.

        A request that requires several approvals stays open, because they are given in the console.
        """
        if request.approvals_needed > 1:
            raise StateConflictError(
                f"{request.issuance_request_id} requires {request.approvals_needed} approvals. "
                "Each approver approves it in the console."
            )
        try:
            if approver_name is None:
                raise StateConflictError("A second person must approve this. Name one with --approved-by.")
            approver = self.operator(approver_name)
            grant = self.grant(approver, Permission.ISSUANCE_APPROVE, request.account, request.requester_person)
            requests.approve_issuance(grant, request, request.plan_digest)
        except Exception:
            if request.state == IssuanceState.PENDING:
                requester = self.operator(request.requester.username)
                grant = self.grant(requester, Permission.ISSUANCE_WITHDRAW, request.account)
                requests.withdraw_issuance(grant, request)
            raise
