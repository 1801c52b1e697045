"""HashiCorp Vault and OpenBao as the secret backend, through hvac.

layout    names: mounts, policies, roles; which role does what
replies   maps a reply of the server to a value or an error of `backends.base`
breaker   circuit breaker for a server that does not answer
logins    authentication by AppRole, Kubernetes or a token file
client    one authenticated client per role: renews its token, counts its calls
kv        the `SecretBackend`: versioned secrets (KV version 2)
transit   signatures, and the wrapped master key of a local keystore, with keys that never leave the server

For administration of a server:

bootstrap     creates and repairs mounts, policies, roles and logins
capabilities  the logins that each kind of host needs, and their permissions
diagnosis     checks a host and its server; `remediation` has the texts
"""
