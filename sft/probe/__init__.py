"""The probes `leak`, `parity` and `data`, each of which answers one question about a user's recipe, data and weights."""
