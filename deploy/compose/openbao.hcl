# OpenBao of the sample: one node that unseals itself with a key in a file, and creates its administrator's token from a
# file at its first start. In production follow ../vault/README.md instead.

ui = false

storage "file" {
  path = "/openbao/file"
}

listener "tcp" {
  address       = "0.0.0.0:8200"
  tls_cert_file = "/run/secrets/servers/openbao.pem"
  tls_key_file  = "/run/secrets/servers/openbao.key"
}

# As long as the sample's certificates live: nothing renews the administrator's token and the logins.
max_lease_ttl = "8760h"

api_addr = "https://openbao:8200"

seal "static" {
  current_key_id = "sample"
  current_key    = "file:///run/secrets/servers/openbao_unseal_key"
}

audit "file" "first" {
  options { file_path = "stdout" }
}

initialize "administrator" {
  request "policy" {
    operation = "update"
    path      = "sys/policies/acl/administrator"
    data = {
      policy = "path \"*\" { capabilities = [\"create\", \"read\", \"update\", \"delete\", \"list\", \"patch\", \"sudo\"] }"
    }
  }

  request "token" {
    operation = "update"
    path      = "auth/token/create"
    data = {
      id = {
        eval_type   = "string"
        eval_source = "file"
        path        = "/run/secrets/servers/openbao_admin_token"
      }
      policies  = ["administrator"]
      no_parent = true
      period    = "8760h"
    }
  }
}
