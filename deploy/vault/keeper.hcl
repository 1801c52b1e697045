# keeper: creates a pepper version, and erases one that no key depends on. Only the host that runs setup and the pepper
# commands has this login.

path "PREFIX-peppers-SCOPE/data/hmac" {
  capabilities = ["create", "update"]
}

path "PREFIX-peppers-SCOPE/destroy/hmac" {
  capabilities = ["update"]
}
