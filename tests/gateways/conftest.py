"""The nginx fixture, which not every machine can provide."""

import pytest

from tests import environment
from tests.servers.nginx import find_nginx


@pytest.fixture(scope="session")
def nginx() -> None:
    """Skip the test without an nginx binary, or fail it if `KEYVAULT_REQUIRE` names nginx."""
    if find_nginx() is not None:
        return
    reason = "no nginx on this machine"
    if "nginx" in environment.required_servers():
        pytest.fail(f"{environment.REQUIRE} names nginx, but there is {reason}", pytrace=False)
    pytest.skip(reason)
