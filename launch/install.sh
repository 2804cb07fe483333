#!/usr/bin/env bash
# Installs sft into a virtual environment, with the versions of constraints.txt.  docs/start/install.md has every case.
#
#   launch/install.sh [--te] [--extras dev,plot] [--wheels DIR] VENV
#
#   --te          also installs Transformer Engine; its part for torch is compiled, which needs a CUDA toolkit of the
#                 version of torch's CUDA (13.0) in CUDA_HOME or /usr/local/cuda, and a C++ compiler
#   --extras A,B  extras of setup.cfg: plot (pictures of runs), dev (tests and lint), fla (Gated DeltaNet on GPUs),
#                 kernels (attention on Hopper and Blackwell), s3 (checkpoints in an object store), wandb, mlflow.  The option can be repeated
#   --wheels DIR  takes packages from this folder only, for a machine without a package index
#   VENV          folder of the environment; an existing environment is updated
#
# PYTHON names the interpreter (python3): 3.11 or later.  launch/Dockerfile and `make venv` run this script, too.
set -euo pipefail

usage() {
    echo "usage: $0 [--te] [--extras dev,plot] [--wheels DIR] VENV" >&2
    exit 2
}

with_te="" extras="" venv="" source=()
while [ $# -gt 0 ]; do
    case "$1" in
    --extras | --wheels) if [ $# -lt 2 ]; then usage; fi ;;
    esac
    case "$1" in
    --te) with_te=yes ;;
    --extras)
        extras="${extras:+$extras,}$2"
        shift
        ;;
    --wheels)
        source=(--no-index --find-links "$(realpath "$2")")
        shift
        ;;
    -* | "") usage ;;
    *)
        if [ -n "$venv" ]; then usage; fi
        venv=$(realpath --canonicalize-missing "$1")
        ;;
    esac
    shift
done
if [ -z "$venv" ]; then usage; fi
cd "$(dirname "$0")/.."

"${PYTHON:-python3}" -m venv "$venv"
install() {
    "$venv/bin/python" -m pip install --disable-pip-version-check --no-compile --constraint constraints.txt \
        "${source[@]}" "$@"
}
install --editable ".${extras:+[$extras]}"
if [ -z "$with_te" ]; then exit; fi

# The headers of cuDNN and NCCL come with torch; the toolkit has all others.
packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
export CPATH="$packages/nvidia/cudnn/include:$packages/nvidia/nccl/include${CPATH:+:$CPATH}"
export NVTE_FRAMEWORK=pytorch
# Without isolation, because the part for torch must be compiled for the torch that is installed.
install setuptools wheel ninja
install --no-build-isolation "transformer-engine[core_cu13,pytorch]"
"$venv/bin/python" -c 'import torch, transformer_engine.pytorch; print("torch", torch.__version__, "with Transformer Engine")'
