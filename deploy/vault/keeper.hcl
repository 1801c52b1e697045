# keeper: makes a new pepper, and erases one that no key needs any more. Only where setup and the pepper commands run.

path "PREFIX-peppers-SCOPE/data/hmac" {
  capabilities = ["create", "update"]
}

path "PREFIX-peppers-SCOPE/destroy/hmac" {
  capabilities = ["update"]
}
