# reader: reads one key at a path that it knows: for whoever collects it, and to settle a write whose answer was lost.
# It lists nothing.

path "PREFIX-keys-SCOPE/data/*" {
  capabilities = ["read"]
}

# Which versions there are, and which of them are deleted or destroyed.
path "PREFIX-keys-SCOPE/metadata/*" {
  capabilities = ["read"]
}

# vault_doctor reads how the mount is configured.
path "PREFIX-keys-SCOPE/config" {
  capabilities = ["read"]
}
