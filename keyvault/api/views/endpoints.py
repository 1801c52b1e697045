"""The endpoint catalog on the service plane."""

from rest_framework.request import Request
from rest_framework.response import Response

from keyvault.access.endpoint_description import describe_catalog_endpoint
from keyvault.access.permissions import Permission
from keyvault.api.enforcement import ServiceView
from keyvault.api.openapi import documented
from keyvault.api.schemas import ENDPOINTS_BODY
from keyvault.services.catalog.catalog import current_catalog


class EndpointsView(ServiceView):
    permission = Permission.KEYS_VERIFY

    @documented(
        "endpoints_list",
        summary="List the endpoints that keys can be verified for.",
        description="The catalog: the built-in endpoints and those that operators added, each with its rule, its "
        "limit and its authorization panel. `name` is what `POST /v1/keys/verify` takes as `endpoint`.",
        permission=Permission.KEYS_VERIFY,
        answers={200: ENDPOINTS_BODY},
    )
    def get(self, request: Request) -> Response:
        return Response({"endpoints": [*map(describe_catalog_endpoint, current_catalog().endpoints)]})
