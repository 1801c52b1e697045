"""The browser and the operating system that a user agent names. The result never contains text of the client."""

import re

_BROWSERS = {
    "Edge": re.compile(r"\bEdgA?(?:iOS)?/([0-9]{1,4})"),
    "Opera": re.compile(r"\bOPR/([0-9]{1,4})"),
    "Firefox": re.compile(r"\b(?:Firefox|FxiOS)/([0-9]{1,4})"),
    "Chrome": re.compile(r"\b(?:Headless)?(?:Chrome|CriOS)/([0-9]{1,4})"),
    "Safari": re.compile(r"\bVersion/([0-9]{1,4})[0-9.]* (?:Mobile/\w+ )?Safari/"),
}
"""Browsers with the pattern of their version. The first match counts: most user agents also name older browsers."""

_SYSTEMS = {
    "iPhone": "iOS",
    "iPad": "iPadOS",
    "Android": "Android",
    "Windows": "Windows",
    "Mac OS X": "macOS",
    "CrOS": "ChromeOS",
    "Linux": "Linux",
}

MAX_BROWSER_LENGTH = 40
"""Maximum length of a browser's name, in characters."""


def name_browser(user_agent: str) -> str:
    """Return a name such as "Firefox 128 on Linux". Unknown parts are omitted."""
    found = ((name, pattern.search(user_agent)) for name, pattern in _BROWSERS.items())
    browser = next((f"{name} {match[1]}" for name, match in found if match), "Unknown browser")
    system = next((name for token, name in _SYSTEMS.items() if token in user_agent), None)
    return browser if system is None else f"{browser} on {system}"
