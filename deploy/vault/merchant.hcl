# merchant: what a merchant's own backend reads in one environment: its own keys and provider credentials, and nobody
# else's. Whose it is stands in the identity entity: metadata "account_id" is the account's id in that environment. An
# entity without it reads nothing. Listing is not needed: the console shows the paths.

path "PREFIX-keys-SCOPE/data/{{identity.entity.metadata.account_id}}/*" {
  capabilities = ["read"]
}
