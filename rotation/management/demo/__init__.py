"""The parts of `manage.py demo`: the scenario, the operators, the merchant's traffic, and the search for secrets."""
