# unwrapper: unwraps the master key of a local keystore, and creates a new one that it sees only wrapped. The key that
# wraps it never leaves the server.

path "PREFIX-wrapping-SCOPE/decrypt/master" {
  capabilities = ["update"]
}

path "PREFIX-wrapping-SCOPE/datakey/wrapped/master" {
  capabilities = ["update"]
}
