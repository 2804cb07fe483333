"""Adapter folders as PEFT writes and reads them: adapter_config.json and adapter_model.safetensors.

    config.py   adapter_config.json, and which of its options are supported
    targets.py  names of modules: the list target_modules, and what PEFT makes of experts
    folder.py   writes and reads a folder

A module is a Linear of transformers, such as model.layers.0.self_attn.q_proj, with weight [out, in].  Its adapter has A
[rank, in] and B [out, rank].  The experts of released files are modules, too, although transformers 5 stacks them:
model.layers.0.mlp.experts.3.gate_proj.  Source of names and rules: PEFT 0.21.2.
"""
