"""Makes a Config from YAML and overrides, and records the origin of every value."""
