"""Proofs that every door obeys the same rules, and what the wire does to a request before it gets there."""
