"""`sft plan --calibrate`: measures the constants of predictions on the device that it runs on.

session   joins the ranks of a launch and measures everything, a minute in total
kernels   rates of matrix products and of attention
links     bandwidth and latency between the ranks, and how far messages hide behind products
steps     times of a few short training steps
fit       constants that only whole steps show, by least squares
"""
