"""Implements `sft plan --calibrate`: measures the constants of predictions on this device, in about a minute."""
