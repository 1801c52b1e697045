# reader: reads a key at a known path, for an operator or a service that collects it, and to find out whether a write
# succeeded whose reply was lost. It cannot list.

path "PREFIX-keys-SCOPE/data/*" {
  capabilities = ["read"]
}

# The list of versions, and which of them are deleted or destroyed.
path "PREFIX-keys-SCOPE/metadata/*" {
  capabilities = ["read"]
}

# check_vault checks the configuration of the mount.
path "PREFIX-keys-SCOPE/config" {
  capabilities = ["read"]
}
