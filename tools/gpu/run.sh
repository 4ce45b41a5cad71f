#!/usr/bin/env bash
# run.sh [--dry] STAGE…: runs tests on a machine with a GPU that has torch, triton and transformers, and no network.
#
# It lies beside the bundles of tools/gpu/bundle.py, which it unpacks; nothing is installed. Stages, each of which ends after
# its minutes at the latest: facts (1), kernels (4), memory (3), engine (8; needs the bundle engine).
# What was found out is in RESULTS (results/ beside this file), after every test: STAGE.md, and the console in STAGE.log.
# --dry rehearses them without a GPU: all tests are collected, and those that run on a CPU are run.
# PYTHON is the Python to use (python3). The exit code is 1 if a test failed or a stage did not end in time.
set -uo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
RESULTS=$(realpath -m "${RESULTS:-$HERE/results}")
PYTHON=${PYTHON:-python3}
CHECKOUT=$HERE/unpacked/checkout
TORCH="gpu and not engine and not server" # needs no other library than torch and Megatron

fail() {
    echo "run.sh: $*" >&2
    exit 2
}

# Unpack the bundle NAME once.
unpack() {
    local name=$1 python parts
    [ ! -f "$HERE/unpacked/$name" ] || return 0
    python=$("$PYTHON" -c 'import sys; print("cp%d%d" % sys.version_info[:2])') || fail "$PYTHON does not run; set PYTHON"
    mapfile -t parts < <(compgen -G "$HERE/$name-*.tar.gz.*of*" | sort)
    ((${#parts[@]})) || fail "no bundle $name in $HERE; make it with tools/gpu/bundle.py"
    [[ ${parts[0]} == *"/$name-$python.tar.gz."* ]] ||
        fail "$(basename "${parts[0]}") is not for the Python of $PYTHON, $python; set PYTHON, or bundle with that Python"
    ((${#parts[@]} == 10#${parts[0]##*of})) || fail "bundle $name has ${#parts[@]} of ${parts[0]##*of} files"
    mkdir -p "$HERE/unpacked"
    cat "${parts[@]}" | tar -xz -C "$HERE/unpacked" || fail "bundle $name cannot be unpacked"
    touch "$CHECKOUT"/{tests,tools}/__init__.py "$HERE/unpacked/$name" # before packages of these names that others install
}

# Run a command for at most so many minutes, without a limit in a rehearsal, and say how the stage ended. Its output is no
# pipe, which a process that outlives it would keep open.
within() {
    local minutes=$1 code seconds
    shift
    seconds=$((dry ? 0 : 60 * minutes))
    (cd "$CHECKOUT" && timeout --kill-after=10 "$seconds" "$@") >>"$RESULTS/$stage.log" 2>&1
    code=$?
    tail -n 1 "$RESULTS/$stage.log"
    case $code in
        0) echo "$stage: passed" ;;
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

dry=0 failed=0
if [ "${1:-}" = --dry ]; then
    dry=1
    shift
fi
(($#)) || fail "which stages? run.sh [--dry] facts kernels memory engine"
unpack base
mkdir -p "$RESULTS"
export PYTHONPATH=$CHECKOUT:$HERE/unpacked/packages HF_HUB_OFFLINE=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
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
    : >"$RESULTS/$stage.log"
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
            ((dry)) || unpack engine
            REHEARSED=()
            tests 5 "gpu and engine and not server" \
                tests/trainer/test_precision.py tests/checkpoint/test_resumed_layers.py tests/planning/test_memory.py
            ((dry)) || within 3 "$PYTHON" tools/bench/gpu.py bfloat16 bfloat16_1b fp8
            ;;
        *) fail "there is no stage $stage: facts, kernels, memory or engine" ;;
    esac
done
exit "$failed"
