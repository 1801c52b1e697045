"""The engine in the ordinary server process: in front of Django, and as a view for requests that reach Django."""

from functools import lru_cache

from django.conf import settings
from django.core.exceptions import RequestDataTooBig
from django.http import HttpRequest, HttpResponse
from django.http.request import split_domain_port, validate_host

from keyvault.api.middleware import FORWARDED_HOST, raw_path, split_base_url
from keyvault.hotpath.adapters.assembly import load_blocking
from keyvault.hotpath.messages.pending_requests import Headers


@lru_cache(maxsize=1024)
def serves_host(host: str) -> bool:
    """Return whether the host serves the service plane.

    A host that only environments use does not, see `EnvironmentMiddleware`.
    """
    domain, _ = split_domain_port(host)
    if not domain or not validate_host(domain, settings.ALLOWED_HOSTS):
        return False
    name = domain.strip("[]")
    own = {split_base_url(url)[0] for url in settings.BASE_URLS.values()}
    return name == split_base_url(settings.ORIGIN)[0] or name not in own


def verifying_view(request: HttpRequest) -> HttpResponse:
    """Answer a request that reached Django: from a server without the engine in front, or from Django's test client."""
    headers = Headers({name.lower(): value for name, value in request.headers.items()})
    if FORWARDED_HOST in request.META:
        headers["host"] = request.META[FORWARDED_HOST]
    try:
        body: bytes | None = request.body
    except RequestDataTooBig:
        body = None
    query = request.META.get("QUERY_STRING")
    target = f"{raw_path(request)}?{query}" if query else raw_path(request)
    answer = load_blocking().frontend.answer(request.method or "", target, headers, body)
    request.request_id = answer.request_id  # type: ignore[attr-defined]  # the middleware's own id would differ
    response = HttpResponse(answer.body, status=answer.status)
    del response["Content-Type"]  # Django's default; an empty response has none
    for name, value in answer.headers:
        response[name] = value
    response.is_logged = True  # type: ignore[attr-defined]  # by the engine
    return response


verifying_view.csrf_exempt = True  # type: ignore[attr-defined]  # no session is a credential here
