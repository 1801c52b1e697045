# offboarder: permanently deletes a path with all its versions when a merchant is offboarded.

path "PREFIX-keys-SCOPE/metadata/*" {
  capabilities = ["delete"]
}
