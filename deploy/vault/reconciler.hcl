# reconciler: lists the paths for the nightly reconciliation. It cannot read a key.

path "PREFIX-keys-SCOPE/metadata/*" {
  capabilities = ["list"]
}
