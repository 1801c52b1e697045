# issuer: writes new keys and provider credentials. It cannot read, not even its own writes.

# "create" permits the first version of a path, "update" each later one. The mount requires check-and-set for both.
path "PREFIX-keys-SCOPE/data/*" {
  capabilities = ["create", "update"]
}
