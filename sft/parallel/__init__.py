"""Layouts, context-parallel sharding, rendezvous, and collectives for small messages, without megatron."""
