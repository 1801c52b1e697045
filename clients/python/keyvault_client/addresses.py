"""Base URLs that a credential may be sent to."""

from ipaddress import ip_address
from urllib.parse import urlsplit

from keyvault_client.errors import RefusedError
from keyvault_client.keystrings import ENVIRONMENT_SCOPES

_ACCEPTED = "Use https://, or http:// on a loopback address."


def parse_base_url(text: str) -> str:
    """Return the URL without a final slash. Raises RefusedError unless it is https, or http on a loopback address."""
    try:
        parts = urlsplit(text)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host, parts = None, urlsplit("")
    has_more = "@" in parts.netloc or parts.query or parts.fragment or "?" in text or "#" in text
    if not host or has_more or not text.isascii() or not text.isprintable() or " " in text or "\\" in text:
        raise RefusedError(f"The base URL is not valid. {_ACCEPTED}", refusal="base_url")
    if parts.scheme != "https" and (parts.scheme != "http" or not _is_loopback(host)):
        raise RefusedError(f"The base URL would send credentials in clear text. {_ACCEPTED}", refusal="base_url")
    return text.rstrip("/")


def require_environment(environment: str, base_url: str) -> None:
    """Raise RefusedError for an unknown environment, or when the base URL's last segment names the other one."""
    if environment not in ENVIRONMENT_SCOPES:
        raise RefusedError(
            f"Unknown environment {environment[:40]!a}. Use 'sandbox' or 'production'.", refusal="environment"
        )
    named = urlsplit(base_url).path.rpartition("/")[2]
    if named in ENVIRONMENT_SCOPES and named != environment:
        raise RefusedError(
            f"The base URL is that of {named}, and the client is for {environment}.", refusal="environment"
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
