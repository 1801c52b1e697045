# offboarder: erases a whole path for ever, when a merchant leaves.

path "PREFIX-keys-SCOPE/metadata/*" {
  capabilities = ["delete"]
}
