# reconciler: says which paths there are, every night. It reads no key.

path "PREFIX-keys-SCOPE/metadata/*" {
  capabilities = ["list"]
}
