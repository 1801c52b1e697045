"""Which plane a path belongs to."""

import pytest

from keyvault.wire.planes import Plane, find_plane


@pytest.mark.parametrize(
    ("path", "plane"),
    [
        ("/sandbox/merchants/orders", Plane.INTEGRATION),
        ("/production/", Plane.INTEGRATION),
        ("/v1/keys/verify", Plane.SERVICE),
        ("/v1/docs/x", Plane.SERVICE),
        ("/admin/", Plane.CONSOLE),
        ("/admin", None),
        ("/v1/docs", None),
        ("/v1/openapi.json", None),
        ("/healthz", None),
        ("/metrics", None),
        ("/", None),
    ],
)
def test_plane_of_a_path(path: str, plane: Plane | None) -> None:
    assert find_plane(path) is plane
