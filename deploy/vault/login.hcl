# Permissions of every login on its own token and secret id. This file is prepended to the policy of each role, because
# the tokens have no "default" policy. Replace PREFIX, ROLE and SCOPE with manage.py vault_bootstrap, or by hand:
#   cat login.hcl issuer.hcl | sed -e s/PREFIX/keyvault/g -e s/ROLE/issuer/g -e s/SCOPE/sandbox/g

# The token is periodic. The process renews it at two thirds of its TTL, as long as it runs.
path "auth/token/renew-self" {
  capabilities = ["update"]
}

# The process reads the TTL of its token.
path "auth/token/lookup-self" {
  capabilities = ["read"]
}

# vault_doctor revokes its own token when it exits.
path "auth/token/revoke-self" {
  capabilities = ["update"]
}

# vault_doctor compares the token's capabilities with the expected ones.
path "sys/capabilities-self" {
  capabilities = ["update"]
}

# vault_doctor reports when the secret id expires. The lookup requires the secret id itself.
path "auth/approle/role/PREFIX-ROLE-SCOPE/secret-id/lookup" {
  capabilities = ["update"]
}
