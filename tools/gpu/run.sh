#!/usr/bin/env bash
# run.sh [--dry] STAGE…: runs tests on a machine with a GPU that has torch, triton and transformers, and no network.
#
# It lies beside the bundles of tools/gpu/bundle.py, which it unpacks; nothing is installed. Stages, each of which ends after
# its minutes at the latest: facts (1), kernels (4), memory (3), engine (8; needs the bundle engine), server (30; PYTHON
# must have SGLang and TransformerEngine: an environment of make setup GPU=1).
# What was found out is in RESULTS (results/ beside this file), after every test: STAGE.md, and the console in STAGE.log.
# --dry rehearses them without a GPU: all tests are collected, and those that run on a CPU are run.
# PYTHON is the Python to use (python3). The exit code is 1 if a test failed, all were skipped, or a stage
# did not end in time. Ctrl-C, SIGTERM and SIGHUP end the stage's command.
set -uo pipefail
shopt -s nullglob

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
RESULTS=$(realpath -m "${RESULTS:-$HERE/results}")
PYTHON=${PYTHON:-python3}
CHECKOUT=$HERE/unpacked/base/checkout
TORCH="gpu and not engine and not server" # needs no other library than torch and Megatron

fail() {
    echo "run.sh: $*" >&2
    exit 2
}

# Unpack the bundle NAME, unless these parts of it are unpacked.
unpack() {
    local name=$1 folder=$HERE/unpacked/$1 python parts checksums
    parts=("$HERE/$name"-*.tar.gz.*of*)
    ((${#parts[@]})) || fail "no bundle $name in $HERE; make it with tools/gpu/bundle.py"
    python=$("$PYTHON" -c 'import sys; print("cp%d%d" % sys.version_info[:2])') || fail "$PYTHON does not run; set PYTHON"
    [[ ${parts[0]} == *"/$name-$python.tar.gz."* ]] ||
        fail "$(basename "${parts[0]}") is not for the Python of $PYTHON, $python; set PYTHON, or bundle with that Python"
    ((${#parts[@]} == 10#${parts[0]##*of})) || fail "bundle $name has ${#parts[@]} of ${parts[0]##*of} files"
    checksums=$(cd "$HERE" && sha256sum "${parts[@]##*/}")
    [ "$(cat "$folder/parts" 2>/dev/null)" != "$checksums" ] || return 0
    rm -rf "$folder"
    mkdir -p "$folder"
    cat "${parts[@]}" | tar -xz -C "$folder" || fail "bundle $name cannot be unpacked"
    echo "$checksums" >"$folder/parts"
}

# At Ctrl-C and the like: the command of a stage has its own process group, which timeout makes.
stop() {
    trap '' INT TERM HUP
    [ -z "$running" ] || { kill -TERM "$running" && wait "$running"; } 2>/dev/null
    echo "run.sh: stopped by SIG$1${stage:+ in the stage $stage}" >&2
    exit $((128 + $(kill -l "$1")))
}

# Whether all tests of this stage were skipped.
nothing_ran() {
    ((!dry)) && grep -qs "^- 0 passed, 0 failed" "$RESULTS/$stage.md"
}

# Run a command for at most so many minutes, without a limit in a rehearsal, and say how the stage ended. Its output is no
# pipe, which a process that outlives it would keep open.
within() {
    local minutes=$1 code seconds
    shift
    seconds=$((dry ? 0 : 60 * minutes))
    (cd "$CHECKOUT" && exec timeout --kill-after=10 "$seconds" "$@") >>"$RESULTS/$stage.log" 2>&1 &
    running=$! # bash calls `stop` at once only while it waits for a process in the background
    wait "$running"
    code=$? running=""
    tail -n 1 "$RESULTS/$stage.log"
    case $code in
        0) if nothing_ran; then
            echo "$stage: nothing ran; $RESULTS/$stage.md has the reasons"
            code=1
        else
            echo "$stage: passed"
        fi ;;
        124 | 137) echo "$stage: did not end in $minutes minutes; $RESULTS/$stage.md has what did" ;;
        *) echo "$stage: failed (exit code $code); see $stage.md and $stage.log in $RESULTS" ;;
    esac
    [ "$code" = 0 ] || failed=1
}

# MINUTES, which tests for GPUs, FILE…; a rehearsal collects them and runs REHEARSED on the CPU.
tests() {
    local minutes=$1 selected=$2
    shift 2
    local pytest=("$PYTHON" -m pytest -v -p no:cacheprovider --gpu-report "$RESULTS/$stage.md")
    if ((!dry)); then
        within "$minutes" "${pytest[@]}" -m "$selected" "$@"
    else
        within "$minutes" "${pytest[@]}" --collect-only -q -m "$selected" "$@"
        ((${#REHEARSED[@]} == 0)) || within "$minutes" "${pytest[@]}" -m "not gpu and not slow" "${REHEARSED[@]}"
    fi
}

dry=0 failed=0 running="" stage="" bundles=(base)
for signal in INT TERM HUP; do
    # shellcheck disable=SC2064  # the name of this signal
    trap "stop $signal" "$signal"
done
if [ "${1:-}" = --dry ]; then
    dry=1
    shift
fi
(($#)) || fail "which stages? run.sh [--dry] facts kernels memory engine server"
for name in "$@"; do
    case $name in
        facts | kernels | memory | server) ;;
        engine) ((dry)) || bundles+=(engine) ;;
        *) fail "there is no stage $name: facts, kernels, memory, engine or server" ;;
    esac
done
python=$(command -v "$PYTHON") || fail "there is no $PYTHON; set PYTHON"
PYTHON=$(realpath -s "$python") # what a link refers to would not be in its virtual environment
for name in "${bundles[@]}"; do
    unpack "$name"
done
touch "$CHECKOUT"/{tests,tools}/__init__.py # before packages of these names that others install
mkdir -p "$RESULTS"
packages=$CHECKOUT:$HERE/unpacked/base/packages
export PYTHONPATH=$packages HF_HUB_OFFLINE=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
"$PYTHON" -c 'import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, ("torch", "triton", "transformers"))))' ||
    fail "$PYTHON lacks torch, triton or transformers; set PYTHON to the one that has them"
# As make test-gpu: TransformerEngine loads parts of cuDNN by name.
LD_LIBRARY_PATH=$("$PYTHON" -c 'import os; from megatron_collab.runtime import toolkit; print(toolkit.library_path(os.environ.get("LD_LIBRARY_PATH")))')
export LD_LIBRARY_PATH
if ((dry)); then
    mkdir -p "$HERE/unpacked/driver"
    "${CC:-cc}" -shared -fPIC -Wl,-soname,libcuda.so.1 -o "$HERE/unpacked/driver/libcuda.so.1" \
        "$CHECKOUT/tests/gpu_set/libcuda.c" || fail "the stand-in for the driver's library cannot be compiled; set CC"
    LD_LIBRARY_PATH=$HERE/unpacked/driver:$LD_LIBRARY_PATH
fi
for stage in "$@"; do
    rm -f "$RESULTS/$stage.md"
    : >"$RESULTS/$stage.log"
    PYTHONPATH=$packages
    [ "$stage" = server ] || PYTHONPATH+=:$HERE/unpacked/engine/packages # PYTHON of that stage has its own, of its torch
    case $stage in
        facts)
            within 1 env STAND_IN_DEVICES=1 "$PYTHON" tools/gpu/facts.py "$RESULTS/facts.md" $( ((dry)) && echo --dry) # only the stand-in reads it
            ;;
        kernels) # what most can go wrong by comes first
            KERNELS=(tests/trainer/test_logprobs.py tests/weight_sync/test_encoding.py tests/trainer/test_host_memory.py
                tests/weight_sync/transports/test_shared_memory.py tests/trainer/test_offload.py)
            REHEARSED=("${KERNELS[@]}" tests/trainer/test_trainer.py::test_training_moves_the_policy_and_ratios_are_clipped)
            tests 4 "$TORCH" "${KERNELS[@]}" tests/trainer/test_trainer.py tests/runtime/test_device.py \
                tests/runtime/test_hang_detector.py
            ;;
        memory)
            REHEARSED=(tests/weight_sync/test_colocated_memory.py)
            tests 3 "$TORCH" "${REHEARSED[@]}"
            ;;
        engine)
            REHEARSED=()
            tests 5 "gpu and engine and not server" \
                tests/trainer/test_precision.py tests/checkpoint/test_resumed_layers.py tests/planning/test_memory.py
            ((dry)) || nothing_ran || within 3 "$PYTHON" tools/bench/gpu.py bfloat16 bfloat16_1b fp8
            ;;
        server) # first what every step of a run depends on
            REHEARSED=()
            tests 30 "gpu and server" tests/weight_sync/test_families.py tests/inference/test_routing.py \
                tests/e2e/test_gpu.py tests/e2e/test_served.py
            ;;
    esac
done
exit "$failed"
