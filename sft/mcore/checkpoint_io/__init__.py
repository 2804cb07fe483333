"""Saves and loads the state of a training engine in megatron-core's checkpoint format.

engine_state        decides what a checkpoint holds and whether it suits the model; calls the other modules
megatron_arguments  describes the model in the arguments of Megatron-LM
optimizer_shards    cuts optimizer states into chunks; partial_stacks: names the states of partly frozen stacks
fp8_state           restores FP8 scales; rng: states of random number generators
torch_dist_files    writes and reads the files
save_plans          plans which rank writes which part; shard_owners: chooses one of the ranks that hold the same shard
safe_reader         reads files without running code from them; metadata_index: reads the index of a checkpoint
chunk_index         finds the stored chunks of a slice
"""
