"""From YAML and overrides to a Config, with the origin of every value."""
