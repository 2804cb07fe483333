#!/usr/bin/env bash
# Trains on this machine, with one process per GPU (or per CPU rank).
#
#   launch/local.sh NPROC RECIPE [section.key=value ...]
#   launch/local.sh 8 recipes/NAME.yaml parallel.cp=4 data.train=my.jsonl
#
# The script first checks the recipe and tokenises data that are not tokenised yet.  If it finds a mistake, it prints
# the mistake and exits with 2.  Then it starts the processes of the run.
#
# After Ctrl-C or another stop signal, the run saves and exits.  After a second signal, the run exits at once.
set -euo pipefail

if [ $# -lt 2 ]; then
    echo "usage: $0 NPROC RECIPE [section.key=value ...]" >&2
    exit 2
fi
nproc=$1
recipe=$2
shift 2

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Seconds that torchrun waits between a signal and SIGKILL: more than run.grace_s.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-180}"

python -m sft check "$recipe" "$@" --world-size "$nproc" --no-data
python -m sft data prepare "$recipe" "$@"
# A process group of its own for torchrun: a signal reaches it once, from this script.
set -m
# Without --signals-to-handle, SIGUSR1 would kill torchrun and leave its processes running.
torchrun --standalone --nproc-per-node "$nproc" --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
    -m sft train "$recipe" "$@" &
started=$!
for signal in TERM INT HUP QUIT USR1; do
    # shellcheck disable=SC2064 # the name of the signal and the process are those of now
    trap "kill -s $signal $started 2>/dev/null || true" "$signal"
done
code=0
while kill -0 "$started" 2>/dev/null; do
    code=0
    wait "$started" || code=$?
done
# torchrun ends with a long traceback of its own, so the reason is repeated here.
if [ "$code" -ne 0 ]; then python -m sft status "$recipe" "$@" || true; fi
exit "$code"
