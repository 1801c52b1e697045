"""The parts of `manage.py demo`: the story, the operators, the merchant's traffic, the search for traces, a report."""
