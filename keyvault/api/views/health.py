"""Whether the process lives, and whether it can judge: what a load balancer asks."""

from collections.abc import Callable
from functools import wraps

from django.db import DatabaseError, connection
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.views.decorators.csrf import csrf_exempt

from keyvault.api.exceptions import problem_response
from keyvault.domain.errors import ErrorCode
from keyvault.models.triggers import missing_triggers
from keyvault.services.peppers import pepper_health


def _read_only(view: Callable[[HttpRequest], HttpResponse]) -> Callable[[HttpRequest], HttpResponse]:
    """GET and HEAD; anything else is a problem document, and no form that could be forged."""

    @csrf_exempt
    @wraps(view)
    def answer(request: HttpRequest) -> HttpResponse:
        if request.method not in {"GET", "HEAD"}:
            detail = "This is only read."
            return problem_response(ErrorCode.METHOD_NOT_ALLOWED, detail, request, allowed_methods=("GET", "HEAD"))
        return view(request)

    return answer


@_read_only
def healthz(request: HttpRequest) -> JsonResponse:
    """The process answers; nothing else is asked, so that an outage elsewhere restarts nothing."""
    return JsonResponse({"status": "ok"})


@_read_only
def readyz(request: HttpRequest) -> JsonResponse:
    """Each thing that a verdict needs, by name: the database with its rules in force, and the peppers."""
    checks = {"database": _database_is_ready()}
    loaded = pepper_health() if checks["database"] else {}
    checks |= {f"peppers_{pepper_set}": ready for pepper_set, ready in loaded.items()}
    ready = all(checks.values()) and bool(loaded)
    states = {name: "ok" if fine else "failing" for name, fine in checks.items()}
    return JsonResponse({"status": "ready" if ready else "not_ready", "checks": states}, status=200 if ready else 503)


def _database_is_ready() -> bool:
    try:
        return not missing_triggers(connection)
    except DatabaseError:
        return False
