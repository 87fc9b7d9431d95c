#!/usr/bin/env bash
# What is judged on a device beyond single ops; a table of verdicts comes last.
# Usage: tools/device_checks.sh OUTPUT_FOLDER [SECTION ...]     default: all but graphs, waits and bench
#   layers    conformance level 2: one layer of each kind, prefill equal to decode
#   engine    levels 3 and 4: the engine, speculation, asynchronous and captured steps, bit for bit
#   graphs    of those the captured decode steps alone
#   golden    bfloat16 logits against the golden folders in $GOLDEN (build/golden)
#   answers   the small checkpoint answers as on the CPU ($MODEL, else one that is made here)
#   tiny      the trained checkpoint in assets: answers as on the CPU, and as many right ones
#   waits     steps that are launched ahead wait for nothing, and the driver looks for waits as well
#   ranks     collectives between as many ranks as there are devices
#   overhead  host time of a decode step at 64 requests, with graphs and without
#   bench     a short selection of benchmarks/layers.py
# Checks run side by side, since most of a first run is the host compiling kernels; timings come after them, one by one.
# $BACKEND is cuda_sm90 unless it is set. The package must be installed (tools/run_on_hopper.sh does that).
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: tools/device_checks.sh OUTPUT_FOLDER [SECTION ...]}
shift
python=${PYTHON:-python3} backend=${BACKEND:-cuda_sm90} golden=${GOLDEN:-build/golden}
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
mkdir -p "$out"
[ $# -gt 0 ] || set -- layers engine golden answers tiny ranks overhead

program() { # what hangs is ended, and says where it was
    timeout -s ABRT -k 5 "${LIMIT_SECONDS:-100}" "$python" -X faulthandler "$@"
}

conformance() { # NAME LEVEL OP-GLOB [CASE-GLOB]
    program -m deepinfer.entrypoints.cli conformance --backend "$backend" --level "$2" --op "$3" ${4:+--case "$4"} \
        --report "$out/$1"
}

section() {
    case $1 in
    layers) conformance layers 2 'layer: *' ;;
    engine) conformance engine 4 engine ;;
    graphs) conformance graphs 3 engine 'captured*' ;;
    golden) program tools/golden_bf16.py "$golden/plain" "$golden/quant" --backend "$backend" ;;
    answers) program tools/same_answers.py ${MODEL:+--model "$MODEL"} --backend "$backend" --limit "${LIMIT:-3}" --jobs 2 ;;
    tiny) program tools/same_answers.py --model assets/deepinfer-tiny --backend "$backend" --limit 3 --score 16 --jobs 3 ;;
    waits) conformance waits 3 engine 'steps that are launched ahead*' ;;
    ranks) program tools/ranks.py --backend "$backend" ;;
    overhead) program benchmarks/graph_overhead.py --backend "$backend" --requests 64 ;;
    bench) program benchmarks/layers.py --backend "$backend" --quick --json "$out/layers.json" ;;
    *) echo "no section $1" && return 2 ;;
    esac
}

timed() { # runs a section, keeps its status and its seconds, and shows the end of its output
    local began=$SECONDS status=0
    section "$1" >"$out/$1.txt" 2>&1 || status=$?
    echo "$status $((SECONDS - began))" >"$out/$1.status"
    printf '== %s\n%s\n' "$1" "$(tail -n "${LINES_SHOWN:-25}" "$out/$1.txt")"
}

for name in "$@"; do
    case $name in overhead | bench) ;; *) timed "$name" & ;; esac
done
wait
for name in "$@"; do
    case $name in overhead | bench) timed "$name" ;; esac
done

failed=0
echo
for name in "$@"; do
    read -r status seconds <"$out/$name.status"
    rm "$out/$name.status"
    [ "$status" -eq 0 ] || failed=1
    printf '%-9s %-8s %4d s\n' "$name" "$([ "$status" -eq 0 ] && echo ok || echo "FAIL $status")" "$seconds"
done
exit $failed
