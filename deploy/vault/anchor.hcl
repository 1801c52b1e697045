# anchor: signs checkpoints of the audit chain. The signing key never leaves the server.

path "PREFIX-anchor-SCOPE/sign/audit" {
  capabilities = ["update"]
}
