# What every login of ours may do with itself. It comes before the policy of each role; there is no "default" policy in
# their tokens. PREFIX, ROLE and SCOPE are filled in by manage.py vault_bootstrap, or by hand:
#   cat login.hcl issuer.hcl | sed -e s/PREFIX/keyvault/g -e s/ROLE/issuer/g -e s/SCOPE/sandbox/g

# Its token is periodic: renewed at two thirds of its life, for as long as the process runs.
path "auth/token/renew-self" {
  capabilities = ["update"]
}

# How long its token lives.
path "auth/token/lookup-self" {
  capabilities = ["read"]
}

# vault_doctor ends the token that it logged in with.
path "auth/token/revoke-self" {
  capabilities = ["update"]
}

# vault_doctor compares what the token may do with what it should.
path "sys/capabilities-self" {
  capabilities = ["update"]
}

# vault_doctor says how long a secret id is good yet. Whoever asks must know the secret id already.
path "auth/approle/role/PREFIX-ROLE-SCOPE/secret-id/lookup" {
  capabilities = ["update"]
}
