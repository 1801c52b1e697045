# courier: fetches a key only inside a wrapping token, which whoever collects the key opens, once.

# The least and the greatest lifetime of the wrapping: an unwrapped read is refused. Of several stanzas for one path the
# lowest minimum wins, so no token may ever have this policy together with the reader's.
path "PREFIX-keys-SCOPE/data/*" {
  capabilities     = ["read"]
  min_wrapping_ttl = "1s"
  max_wrapping_ttl = "900s"
}

# Whether a wrapping token is still unopened, and its end when it is doubted. Both take an accessor, of whatever token of
# this server (the server knows no narrower way): the courier may not list them and knows those of its own wrapping
# tokens only, but whoever steals this login AND reads Keyvault's database can end hand-overs before they are opened.
path "auth/token/lookup-accessor" {
  capabilities = ["update"]
}

path "auth/token/revoke-accessor" {
  capabilities = ["update"]
}
