#!/usr/bin/env bash
# Train on this machine: one process per GPU (or per CPU rank).
#
#   launch/local.sh NPROC RECIPE [section.key=value ...]
#   launch/local.sh 8 recipes/NAME.yaml parallel.cp=4 data.train=my.jsonl
#
# The recipe is checked first, and its data tokenised where that was not done yet, before any process starts that
# waits for others: a mistake ends here, in one paragraph, with exit code 2.
#
# Ctrl-C, or a signal to this process: the run saves and leaves.  The same once more: it leaves at once.
set -euo pipefail

if [ $# -lt 2 ]; then
    echo "usage: $0 NPROC RECIPE [section.key=value ...]" >&2
    exit 2
fi
nproc=$1
recipe=$2
shift 2

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# One hardware queue keeps kernels in the order they were launched, so that communication overlaps compute.
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
# Seconds torchrun leaves its processes between a signal and SIGKILL: run.grace_s and some room.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-180}"

python -m sft check "$recipe" "$@" --world-size "$nproc" --no-data
python -m sft data prepare "$recipe" "$@"
# torchrun would die of a SIGUSR1 that it does not handle, and leave its processes running.
exec torchrun --standalone --nproc-per-node "$nproc" --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
    -m sft train "$recipe" "$@"
