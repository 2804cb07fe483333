"""Gated DeltaNet, a layer with a state of fixed size instead of keys (arXiv:2412.06464).

delta_rule.py defines the recurrence and the interface of its kernels, torch_kernel.py computes it in plain torch, and
gated_delta.py makes it differentiable, also where a state comes from another rank.
"""
