# lookup: loads the peppers when a process starts; verification never asks again. Every host has it.

path "PREFIX-peppers-SCOPE/data/hmac" {
  capabilities = ["read"]
}

# Which versions there are.
path "PREFIX-peppers-SCOPE/metadata/hmac" {
  capabilities = ["read"]
}

# vault_doctor reads how the mount is configured.
path "PREFIX-peppers-SCOPE/config" {
  capabilities = ["read"]
}

# The public keys that checkpoints of the audit chain are checked with, wherever somebody looks at them. Signing is the
# anchor's alone.
path "PREFIX-anchor-SCOPE/keys/audit" {
  capabilities = ["read"]
}
