"""Layout arithmetic, context-parallel sharding, and collectives for small messages, without megatron."""
