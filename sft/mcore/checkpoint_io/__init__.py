"""What of a run is stored, and how: sharded tensors and plain values of megatron-core's checkpoints.

shards      what is in one, and whether it suits the model; calls all the rest
moments     the optimizer's part, scales that of FP8, rng that of random generators
torch_dist  which rank writes and reads which bytes; overlap which stored parts a box needs
safe        reading without running anything of it; index the table of contents
"""
