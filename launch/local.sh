#!/usr/bin/env bash
# Trains on this machine, with one process per GPU (or per CPU rank).
#
#   launch/local.sh NPROC RECIPE [section.key=value ...]
#   launch/local.sh 8 recipes/NAME.yaml parallel.cp=4 data.train=my.jsonl
#
# The script first checks the recipe and tokenises data that are not tokenised yet.  If it finds a mistake, it prints
# the mistake and exits with 2.  Then it starts the processes of the run.  NPROC may be auto: one process per GPU.
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

if [ "$nproc" != auto ]; then python -m sft check "$recipe" "$@" --world-size "$nproc" --no-data; fi
python -m sft data prepare "$recipe" "$@"
# The run gets the signals of this process.  Its own exit code says whether to start it again: 75.
exec python -m sft train "$recipe" "$@" --processes "$nproc"
