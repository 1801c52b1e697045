"""A view without work for each peer, protected by it."""

from django.urls import path
from django.utils.module_loading import import_string
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

_ANSWER = {"hello": "world"}


class ApiKeyView(APIView):
    """Protected as in the documentation of djangorestframework-api-key."""

    authentication_classes = ()
    permission_classes = (import_string("rest_framework_api_key.permissions.HasAPIKey"),)

    def post(self, request: Request) -> Response:
        return Response(_ANSWER)


class KnoxView(APIView):
    """Protected as in the documentation of django-rest-knox."""

    authentication_classes = (import_string("knox.auth.TokenAuthentication"),)
    permission_classes = (import_string("rest_framework.permissions.IsAuthenticated"),)

    def post(self, request: Request) -> Response:
        return Response(_ANSWER)


urlpatterns = [path("api-key", ApiKeyView.as_view()), path("knox", KnoxView.as_view())]
