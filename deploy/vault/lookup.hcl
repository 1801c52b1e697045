# lookup: loads peppers into a process. Verification does not call the server. Every host has this role.

path "PREFIX-peppers-SCOPE/data/hmac" {
  capabilities = ["read"]
}

# Lists the versions.
path "PREFIX-peppers-SCOPE/metadata/hmac" {
  capabilities = ["read"]
}

# vault_doctor reads the configuration of the mount.
path "PREFIX-peppers-SCOPE/config" {
  capabilities = ["read"]
}

# Reads the public keys that verify checkpoints of the audit chain. Only the role anchor may sign.
path "PREFIX-anchor-SCOPE/keys/audit" {
  capabilities = ["read"]
}
