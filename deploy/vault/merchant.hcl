# merchant: a merchant's own backend reads its keys and provider credentials in one environment, and no other
# merchant's. The metadata "account_id" of the identity entity is the account's id in that environment. An entity
# without it can read nothing. The policy does not permit listing: the console shows the paths.

path "PREFIX-keys-SCOPE/data/{{identity.entity.metadata.account_id}}/*" {
  capabilities = ["read"]
}
