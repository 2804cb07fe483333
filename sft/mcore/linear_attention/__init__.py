"""Gated DeltaNet, a layer with a state of fixed size instead of keys (arXiv:2412.06464).

documents.py          computes a layer's attention over packed documents under context parallelism; calls the others
delta_rule.py         defines the recurrence and the interface of its kernels
gated_delta.py        makes the recurrence differentiable, also if a state comes from another rank
torch_kernel.py       a kernel in plain torch; schedule.py: the order of its chunks; chunks.py: the products of a block
fla_kernel.py         a kernel of flash-linear-attention (FLA); fla_rule.py: the rule; fla_layer.py: what surrounds it
fla_functions.py      the functions of FLA that are called; fla_compilation.py: compiles them before the first pass
relayout.py           sends the tokens of short documents; state_passing.py: passes the states of long documents
short_convolution.py  the convolution before the recurrence; gated_norm.py: the norm after it
"""
