"""Parse, ask a service, render; no judgement about rights."""
