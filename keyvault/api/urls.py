"""The service plane's routes.

An id is any path segment: a view answers for an id of another form as for an absent one, after the token is judged.
"""

from django.urls import path

from keyvault.api.views.changes import (
    ChangesView,
    ConfirmationsView,
    SnapshotCustomersView,
    SnapshotKeysView,
    SnapshotPeppersView,
    SnapshotTokensView,
    SnapshotView,
    UsageReportsView,
)
from keyvault.api.views.docs import DocsView, OpenAPIView
from keyvault.api.views.endpoints import EndpointsView
from keyvault.api.views.health import HealthView, ReadinessView
from keyvault.api.views.issuance import (
    CollectionView,
    IssuanceRequestsView,
    IssuanceRequestView,
)
from keyvault.api.views.keys import CredentialsView, CredentialView, KeyView, RevokeView
from keyvault.api.views.metrics import MetricsView
from keyvault.api.views.revocations import RevocationView

urlpatterns = [
    path("healthz", HealthView.as_view()),
    path("readyz", ReadinessView.as_view()),
    path("metrics", MetricsView.as_view()),
    path("v1/openapi.json", OpenAPIView.as_view(), name="openapi"),
    path("v1/docs", DocsView.as_view()),
    path("v1/keys/<key_id>", KeyView.as_view()),
    path("v1/keys/<key_id>/revoke", RevokeView.as_view()),
    path("v1/revocations/<sequence>", RevocationView.as_view()),
    path("v1/changes", ChangesView.as_view()),
    path("v1/changes/confirmations", ConfirmationsView.as_view()),
    path("v1/usage-reports", UsageReportsView.as_view()),
    path("v1/snapshot", SnapshotView.as_view()),
    path("v1/snapshot/keys", SnapshotKeysView.as_view()),
    path("v1/snapshot/tokens", SnapshotTokensView.as_view()),
    path("v1/snapshot/customers", SnapshotCustomersView.as_view()),
    path("v1/snapshot/peppers", SnapshotPeppersView.as_view()),
    path("v1/credentials", CredentialsView.as_view()),
    path("v1/credentials/<credential_id>", CredentialView.as_view()),
    path("v1/endpoints", EndpointsView.as_view()),
    path("v1/issuance-requests", IssuanceRequestsView.as_view()),
    path("v1/issuance-requests/<issuance_request_id>", IssuanceRequestView.as_view()),
    path("v1/issuance-requests/<issuance_request_id>/collect", CollectionView.as_view()),
]
