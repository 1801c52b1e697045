# destroyer: erases single versions for ever, after their keys were revoked.

path "PREFIX-keys-SCOPE/destroy/*" {
  capabilities = ["update"]
}
