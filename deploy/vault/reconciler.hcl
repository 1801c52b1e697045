# reconciler: lists the paths every night. It cannot read keys.

path "PREFIX-keys-SCOPE/metadata/*" {
  capabilities = ["list"]
}
