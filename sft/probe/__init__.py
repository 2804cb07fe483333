"""The probes of `sft probe`: `leak`, `parity` and `data`.  Each answers one question about a user's recipe, data and
weights."""
