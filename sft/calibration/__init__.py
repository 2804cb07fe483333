"""`sft plan --calibrate`: measures the constants of predictions on the device that it runs on, in about a minute."""
