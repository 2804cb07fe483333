"""A rank that never ends, but with what started it."""

import os
import time

from sft.run.signals import leave_with_parent

if __name__ == "__main__":
    leave_with_parent()
    print(f"rank {os.environ['RANK']} sleeps as {os.getpid()}", flush=True)
    time.sleep(600)
