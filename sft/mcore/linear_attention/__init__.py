"""Layers with a state of fixed size instead of keys, such as Gated DeltaNet (arXiv:2412.06464).

All recurrences share:

recurrence.py           the interface of their kernels; documents.py: a recurrence over packed documents under CP
recurrent_attention.py  makes a recurrence differentiable, also if a state comes from another rank
state_passing.py        passes the states of long documents; relayout.py: sends the tokens of short ones
short_convolution.py    the convolution before a recurrence
chunked_kernel.py       a kernel in plain torch; schedule.py: the order of its chunks; block_tensors.py: their tensors
fla_recurrence.py       the frame of a kernel of flash-linear-attention (FLA); fla_functions.py: the functions that are
                        called; fla_layer.py: its convolution

The gated delta rule:

delta_rule.py           its inputs and the interface of its kernels; gated_norm.py: the norm after it
torch_kernel.py         a kernel in plain torch; chunks.py: the products of a block
fla_kernel.py           a kernel of FLA; fla_rule.py: the rule; fla_compilation.py: compiles it before the first pass
"""
