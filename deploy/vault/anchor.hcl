# anchor: signs checkpoints of the audit chain, and records evidence. The signing key never leaves the server.

path "PREFIX-anchor-SCOPE/sign/audit" {
  capabilities = ["update"]
}

# The number and digest of the newest checkpoint. A database that was set back or rewritten does not match them.
path "PREFIX-evidence-SCOPE/data/checkpoint" {
  capabilities = ["create", "update"]
}

# The newest revocations.
path "PREFIX-evidence-SCOPE/data/revocations" {
  capabilities = ["create", "update"]
}

# Segments of older revocations: written once.
path "PREFIX-evidence-SCOPE/data/revocations/*" {
  capabilities = ["create"]
}
