module keyvault.example/client

go 1.24
