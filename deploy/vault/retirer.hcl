# retirer: soft-deletes a version, and restores it.

path "PREFIX-keys-SCOPE/delete/*" {
  capabilities = ["update"]
}

path "PREFIX-keys-SCOPE/undelete/*" {
  capabilities = ["update"]
}
