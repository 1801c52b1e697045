# lookup: loads the peppers when a process starts; verification never reads the Vault. Every host has this login.

path "PREFIX-peppers-SCOPE/data/hmac" {
  capabilities = ["read"]
}

# The list of versions.
path "PREFIX-peppers-SCOPE/metadata/hmac" {
  capabilities = ["read"]
}

# check_vault checks the configuration of the mount.
path "PREFIX-peppers-SCOPE/config" {
  capabilities = ["read"]
}

# The public keys that verify checkpoints of the audit chain. Only the anchor can sign.
path "PREFIX-anchor-SCOPE/keys/audit" {
  capabilities = ["read"]
}

# The number and digest of the newest checkpoint. Only the anchor can write them.
path "PREFIX-evidence-SCOPE/data/checkpoint" {
  capabilities = ["read"]
}

# The revocation anchor, from which a host without a revocation log rebuilds it.
path "PREFIX-evidence-SCOPE/data/revocations" {
  capabilities = ["read"]
}

path "PREFIX-evidence-SCOPE/data/revocations/*" {
  capabilities = ["read"]
}

# check_vault checks the configuration of the mount.
path "PREFIX-evidence-SCOPE/config" {
  capabilities = ["read"]
}
