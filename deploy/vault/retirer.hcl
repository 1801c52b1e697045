# retirer: takes a version out of reading, and brings it back. Nothing is lost by it.

path "PREFIX-keys-SCOPE/delete/*" {
  capabilities = ["update"]
}

path "PREFIX-keys-SCOPE/undelete/*" {
  capabilities = ["update"]
}
