"""The OpenAPI page, as JSON and as Swagger UI."""

from functools import cache
from typing import Any

from django.http import HttpResponse
from django.shortcuts import render
from drf_spectacular.generators import SchemaGenerator
from rest_framework.request import Request
from rest_framework.response import Response

from keyvault.api import openapi_fields  # noqa: F401  drf-spectacular finds what is loaded
from keyvault.api.openapi import NO_CREDENTIAL, PUBLIC_CODES, documented
from keyvault.api.public import PublicView

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        # Swagger UI sets inline styles and loads its icons from data: URLs.
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "base-uri 'none'",
    )
)


@cache
def openapi_page() -> dict[str, Any]:
    """Generate the page, once per process."""
    page: dict[str, Any] = SchemaGenerator().get_schema(request=None, public=True)  # type: ignore[no-untyped-call]  # untyped package
    return page


class OpenAPIView(PublicView):
    @documented(
        "openapi",
        summary="This OpenAPI page.",
        description="The reference of this release, for client generators and contract tests. It needs no credential "
        "and is the same for every caller.",
        answers={200: dict},
        plane=PUBLIC_CODES,
        auth=NO_CREDENTIAL,
        tag="operations",
    )
    def get(self, request: Request) -> Response:
        return Response(openapi_page())


class DocsView(PublicView):
    @documented(
        "docs",
        summary="This OpenAPI page in Swagger UI.",
        description="The same reference for people. The page loads nothing from other hosts and sends no request by "
        "itself.",
        answers={(200, "text/html"): str},
        plane=PUBLIC_CODES,
        auth=NO_CREDENTIAL,
        tag="operations",
    )
    def get(self, request: Request) -> HttpResponse:
        page = render(request._request, "docs.html")
        page["Content-Security-Policy"] = CONTENT_SECURITY_POLICY
        return page
