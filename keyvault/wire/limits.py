"""The RateLimit header fields of draft-ietf-httpapi-ratelimit-headers-10, as Structured Fields lists."""

from keyvault.access.limits import BucketStatus, Spend


def limit_headers(spend: Spend | None) -> dict[str, str]:
    """Return `RateLimit-Policy` and `RateLimit`. Empty without a spend: limits are not disclosed before proof."""
    if spend is None:
        return {}
    return {
        "RateLimit-Policy": ", ".join(map(_policy, spend.standings)),
        "RateLimit": ", ".join(map(_standing, spend.standings)),
    }


def _policy(standing: BucketStatus) -> str:
    return f'"{standing.policy}";q={standing.limit.count};w={standing.limit.seconds}'


def _standing(standing: BucketStatus) -> str:
    return f'"{standing.policy}";r={standing.remaining};t={standing.reset_seconds}'
