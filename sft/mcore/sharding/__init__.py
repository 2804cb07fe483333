"""Shards gradients and weights over the ranks that hold the same model (parallel.shard = gradients or weights)."""
