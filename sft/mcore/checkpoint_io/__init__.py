"""The state of a training engine <-> sharded tensors and plain values of megatron-core's checkpoints.

engine_state      what a checkpoint holds, and whether it suits the model; calls all the rest
optimizer_shards  the optimizer's part; fp8_state that of FP8, rng that of the random generators
torch_dist_files  which rank writes and reads which bytes; chunk_index which stored chunks a slice needs
safe_reader       reads without running code of a file; metadata_index its table of contents
"""
