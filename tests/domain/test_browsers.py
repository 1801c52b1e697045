"""Names of browsers: fixed words and a version, whatever the client sends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyvault.domain.browsers import MAX_BROWSER_LENGTH, name_browser

_APPLE = "AppleWebKit/605.1.15 (KHTML, like Gecko) Version/17.5"
_CHROME = "AppleWebKit/537.36 (KHTML, like Gecko) Chrome/126.0.0.0 Safari/537.36"


@pytest.mark.parametrize(
    ("user_agent", "name"),
    [
        ("Mozilla/5.0 (X11; Linux x86_64; rv:128.0) Gecko/20100101 Firefox/128.0", "Firefox 128 on Linux"),
        (f"Mozilla/5.0 (Windows NT 10.0; Win64; x64) {_CHROME}", "Chrome 126 on Windows"),
        (f"Mozilla/5.0 (Windows NT 10.0; Win64; x64) {_CHROME} Edg/126.0.2592.87", "Edge 126 on Windows"),
        (f"Mozilla/5.0 (X11; CrOS x86_64 14541.0.0) {_CHROME}", "Chrome 126 on ChromeOS"),
        (
            f"Mozilla/5.0 (Macintosh; Intel Mac OS X 10_15_7) {_APPLE} Safari/605.1.15",
            "Safari 17 on macOS",
        ),
        (
            f"Mozilla/5.0 (iPhone; CPU iPhone OS 17_5 like Mac OS X) {_APPLE} Mobile/15E148 Safari/604.1",
            "Safari 17 on iOS",
        ),
        ("curl/8.8.0", "Unknown browser"),
        ("", "Unknown browser"),
    ],
)
def test_browser_is_named_with_its_version_and_system(user_agent: str, name: str) -> None:
    assert name_browser(user_agent) == name


@given(st.text() | st.from_regex(r"Firefox/\d+ .*|.*Chrome/\d+ \(.*", fullmatch=True))
def test_browser_has_a_short_name_without_text_of_the_client(user_agent: str) -> None:
    name = name_browser(user_agent)
    assert len(name) <= MAX_BROWSER_LENGTH
    assert name.isascii()
    assert name.replace(" ", "").isalnum()
