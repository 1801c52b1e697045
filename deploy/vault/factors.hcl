# factors: encrypts and decrypts the seeds of operators' second factors. The key never leaves the server.

path "PREFIX-factors-SCOPE/encrypt/seeds" {
  capabilities = ["update"]
}

path "PREFIX-factors-SCOPE/decrypt/seeds" {
  capabilities = ["update"]
}
