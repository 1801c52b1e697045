# destroyer: permanently erases single versions whose keys are revoked.

path "PREFIX-keys-SCOPE/destroy/*" {
  capabilities = ["update"]
}
