"""Saves and loads the state of a training engine in megatron-core's checkpoint format.

engine_state      decides what a checkpoint holds and whether it suits the model; calls the other modules
megatron_arguments  the model, as Megatron-LM describes it
optimizer_shards  optimizer states; fp8_state: FP8 scales; rng: states of random number generators
torch_dist_files  assigns bytes to ranks, writes and reads files; chunk_index: finds the stored chunks of a slice
safe_reader       reads files without running code from them; metadata_index: reads the index of a checkpoint
"""
