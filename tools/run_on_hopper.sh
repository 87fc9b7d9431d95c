#!/usr/bin/env bash
# Install this tree beside the machine's own torch and Triton, and hold the Hopper backend against the op contracts.
# Usage: tools/run_on_hopper.sh OUTPUT_FOLDER [arguments of tools/conformance_shards.py]
# Needs: a GPU of compute capability 9.0; torch with CUDA, triton, scikit-build-core, pybind11 and ninja installed.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: tools/run_on_hopper.sh OUTPUT_FOLDER [arguments]}
shift
python=${PYTHON:-python3}
"$python" -m pip install --quiet --no-build-isolation --no-deps --editable . 2>&1 | tail -3
export OMP_NUM_THREADS=1
"$python" tools/conformance_shards.py --backend cuda_sm90 --real --report "$out" "$@"
