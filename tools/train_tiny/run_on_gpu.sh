#!/usr/bin/env bash
# Train the small checkpoint in pieces on a machine with a GPU; each call goes on where the one before stopped.
# Usage: tools/train_tiny/run_on_gpu.sh OUTPUT_FOLDER [arguments of python -m tools.train_tiny]
#   rehearsal:  RUN=build/rehearsal tools/train_tiny/run_on_gpu.sh OUT --minutes 2 --steps 300 --log-every 10
#   each piece: tools/train_tiny/run_on_gpu.sh OUT --minutes 8
# State, log and tokenizer stay in $RUN (build/train_tiny); OUTPUT_FOLDER gets the checkpoint, its card and the log.
# Needs torch with CUDA, tokenizers and safetensors; no network, no build. $RUN is a path inside the repository.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:?usage: tools/train_tiny/run_on_gpu.sh OUTPUT_FOLDER [arguments]}
shift
python=${PYTHON:-python3}
run=${RUN:-build/train_tiny}
workers=${WORKERS:-$(($(nproc) > 2 ? $(nproc) - 2 : 1))}
mkdir -p "$out" "$run"
# Training needs none of the compiled modules, so a view of the source folders under one name saves their build.
view="$run/view/deepinfer"
mkdir -p "$view"
for folder in core ops backends models entrypoints; do ln -sfn "$PWD/$folder" "$view/$folder"; done
ln -sfn "$PWD/core/_facade/__init__.py" "$view/__init__.py"
export PYTHONPATH="$PWD/$run/view${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
status=0
"$python" -m tools.train_tiny --out "$run" --export "$out/deepinfer-tiny" --resume --workers "$workers" "$@" \
    2>&1 | tee -a "$run/log.txt" || status=$?
cp -f "$run"/log.txt "$run"/plan.json "$out"/
if [ -f "$run/probes.jsonl" ]; then cp -f "$run/probes.jsonl" "$out"/; fi
exit "$status"
