# keeper: creates peppers, and destroys those that no key needs. Only for hosts that run setup and the pepper commands.

path "PREFIX-peppers-SCOPE/data/hmac" {
  capabilities = ["create", "update"]
}

path "PREFIX-peppers-SCOPE/destroy/hmac" {
  capabilities = ["update"]
}
