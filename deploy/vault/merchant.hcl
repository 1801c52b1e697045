# merchant: lets a merchant's own backend read its keys and provider credentials in one environment, and no others. The
# identity entity names the account: its metadata "account_id" is the account's id in that environment. An entity
# without it reads nothing. Keys that are not delivered yet lie under pending/, which no account can read. The policy
# cannot list: the console shows the paths.

path "PREFIX-keys-SCOPE/data/{{identity.entity.metadata.account_id}}/*" {
  capabilities = ["read"]
}
