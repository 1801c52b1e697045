# anchor: signs checkpoints of the audit chain. The key itself never leaves the server.

path "PREFIX-anchor-SCOPE/sign/audit" {
  capabilities = ["update"]
}
