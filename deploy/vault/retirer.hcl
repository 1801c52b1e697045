# retirer: soft-deletes a version, and restores it. Both are reversible.

path "PREFIX-keys-SCOPE/delete/*" {
  capabilities = ["update"]
}

path "PREFIX-keys-SCOPE/undelete/*" {
  capabilities = ["update"]
}
