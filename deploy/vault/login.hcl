# What every login may do with its own token and secret id. bootstrap_vault prepends it to the policy of each role,
# since the tokens do not have Vault's "default" policy, and fills in PREFIX, ROLE and SCOPE. To do so by hand:
#   cat login.hcl issuer.hcl | sed -e s/PREFIX/keyvault/g -e s/ROLE/issuer/g -e s/SCOPE/sandbox/g

# The token is periodic: the process renews it at two thirds of its period.
path "auth/token/renew-self" {
  capabilities = ["update"]
}

# The process reads the remaining lifetime of its token.
path "auth/token/lookup-self" {
  capabilities = ["read"]
}

# check_vault revokes its own token when it ends.
path "auth/token/revoke-self" {
  capabilities = ["update"]
}

# check_vault compares the token's capabilities with the expected ones.
path "sys/capabilities-self" {
  capabilities = ["update"]
}

# check_vault reports when a secret id expires. The look-up requires the secret id itself.
path "auth/approle/role/PREFIX-ROLE-SCOPE/secret-id/lookup" {
  capabilities = ["update"]
}
