"""What `manage.py demo` is made of: the story, the people, the merchant's traffic, the traces, the report."""
