"""Where a replacement goes: each way of delivery behind one contract, see `base`."""

from rotation.deployers.base import Deployer, Standing
from rotation.deployers.secret_backend import SecretBackend
from rotation.deployers.webhook import MerchantWebhook
from rotation.policy import DeliveryChannel

DEPLOYERS: dict[DeliveryChannel, Deployer] = {
    DeliveryChannel.SECRET_BACKEND: SecretBackend(),
    DeliveryChannel.WEBHOOK: MerchantWebhook(),
}

__all__ = ["DEPLOYERS", "Deployer", "MerchantWebhook", "SecretBackend", "Standing"]
