"""The RateLimit header fields of draft-ietf-httpapi-ratelimit-headers-10, as Structured Fields lists."""

from keyvault.access.limits import BucketStatus, Spend


def limit_headers(spend: Spend | None) -> dict[str, str]:
    """Return `RateLimit-Policy` and `RateLimit`. Empty without a spend: limits are not disclosed before proof."""
    if spend is None:
        return {}
    return {
        "RateLimit-Policy": ", ".join(map(_policy, spend.statuses)),
        "RateLimit": ", ".join(map(_rate_limit, spend.statuses)),
    }


def _policy(status: BucketStatus) -> str:
    return f'"{status.policy}";q={status.limit.count};w={status.limit.seconds}'


def _rate_limit(status: BucketStatus) -> str:
    return f'"{status.policy}";r={status.remaining};t={status.reset_seconds}'
