# offboarder: permanently erases the paths of an offboarded merchant.

path "PREFIX-keys-SCOPE/metadata/*" {
  capabilities = ["delete"]
}
