"""HashiCorp Vault and OpenBao as the secret backend, through hvac.

layout    names: mounts, policies, roles; which role does what
replies   what an answer of the server means: our own few errors, with the status kept
breaker   stops asking a server that does not answer
logins    how a process proves who it is: AppRole, Kubernetes, a token file
client    one logged-in client of a role: token kept fresh, calls counted
kv        the `SecretBackend`: versioned secrets (KV version 2)
transit   signatures with a key that never leaves the server

and for whoever sets a server up and looks after it:

bootstrap     mounts, policies, roles and logins, made or mended
capabilities  which kind of host needs which logins, and what each may do
doctor        what is wrong, looked at as the service looks; `cures` has its words
"""
