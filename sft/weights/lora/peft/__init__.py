"""Writes and reads adapter folders of PEFT: adapter_config.json and adapter_model.safetensors.

    config.py   writes and reads adapter_config.json, and refuses options that are not supported
    targets.py  computes target_modules, and the options with which PEFT stacks adapters of experts
    folder.py   writes and reads a folder

A module is a Linear of transformers, such as model.layers.0.self_attn.q_proj, with weight [out, in].  Its adapter has A
[rank, in] and B [out, rank].  The matrices of a single expert are also modules, as in released files, although
transformers 5 stacks them: model.layers.0.mlp.experts.3.gate_proj.  Source of names and rules: PEFT 0.21.2.
"""
