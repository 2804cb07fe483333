"""Computes recurrences, whose layers have a state of fixed size instead of keys.

All recurrences share these modules:

recurrence.py           the interface of their kernels; documents.py: a recurrence over packed documents under CP
recurrent_attention.py  makes a recurrence differentiable, also if a state comes from another rank
state_passing.py        passes the states of long documents; relayout.py: sends the tokens of short ones
short_convolution.py    the convolution before a recurrence
chunked_kernel.py       a kernel in plain torch; schedule.py: the order of its chunks; block_tensors.py: their tensors
fla_recurrence.py       the frame of a kernel of flash-linear-attention (FLA); fla_functions.py: the functions that are
                        called; fla_layer.py: its convolution

The module of a recurrence's layer, such as sft/mcore/model/gated_delta_net.py, names the other files of the recurrence.
"""
