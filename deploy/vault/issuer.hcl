# issuer: stores new keys and provider credentials. It reads nothing back, not even what it wrote.

# "create" is the first version of a path, "update" each later one. The mount wants check-and-set for both.
path "PREFIX-keys-SCOPE/data/*" {
  capabilities = ["create", "update"]
}
