"""nginx, which not every machine has."""

import pytest

from tests import environment
from tests.servers.nginx import find_nginx


@pytest.fixture(scope="session")
def nginx() -> None:
    """Asked for by every test that starts one: skips it where there is none, unless `KEYVAULT_REQUIRE` names it."""
    if find_nginx() is not None:
        return
    reason = "no nginx on this machine"
    if "nginx" in environment.required_servers():
        pytest.fail(f"{environment.REQUIRE} names nginx, but there is {reason}", pytrace=False)
    pytest.skip(reason)
