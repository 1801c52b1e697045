# reader: reads a key at a known path, to hand it over, and to determine the outcome of a write without a reply. It
# cannot list paths.

path "PREFIX-keys-SCOPE/data/*" {
  capabilities = ["read"]
}

# Lists the versions, and which of them are deleted or destroyed.
path "PREFIX-keys-SCOPE/metadata/*" {
  capabilities = ["read"]
}

# vault_doctor reads the configuration of the mount.
path "PREFIX-keys-SCOPE/config" {
  capabilities = ["read"]
}
