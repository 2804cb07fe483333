"""From the sums of a step to the numbers in the log."""
