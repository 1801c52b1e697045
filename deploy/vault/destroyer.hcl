# destroyer: permanently destroys single versions after their keys were revoked.

path "PREFIX-keys-SCOPE/destroy/*" {
  capabilities = ["update"]
}
