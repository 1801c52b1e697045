# offboarder: permanently erases the paths of an offboarded merchant, and the pending copies of keys that are delivered.

path "PREFIX-keys-SCOPE/metadata/*" {
  capabilities = ["delete"]
}
