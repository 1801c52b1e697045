"""Operators, their sessions, and changes of them that a second person approves."""
