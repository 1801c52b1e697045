"""The service without rotation: its settings, its routes, and the program that `test_keyvault_alone` runs."""
