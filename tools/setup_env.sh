#!/usr/bin/env bash
# Makes .venv in the current folder: Python 3.12 or 3.13, torch, the locks of requirements/, this project.
#
# PYTHON is the Python to use; without it one is looked for on PATH, under pyenv and among uv's own.
# GPU=1 adds the packages for GPUs, with TransformerEngine, to this environment or a new one; it keeps them from then on.
# TORCH_INDEX is a package index for torch and torchvision alone, for instance one with CPU builds.
# MAX_JOBS is how many files of TransformerEngine are compiled at a time, VENV another folder than .venv.
#
# Run again it installs nothing; interrupted it goes on. What stands in the way is said in one line that
# begins with "setup:", and the exit code is 1. pip's own output goes to .venv/setup.log.
set -euo pipefail
unset PIP_CONSTRAINT # NVIDIA's containers set it, to keep a torch of their own

VENV=${VENV:-.venv}
LOG=$VENV/setup.log
STAMP=$VENV/setup.stamp
GPU_FILE=$VENV/setup.gpu     # exists if the packages for GPUs are to be installed
INDEX_FILE=$VENV/setup.index # TORCH_INDEX of the torch that is installed
ENGINE=transformer-engine
COMPILED=$ENGINE-torch # exists as source only
GB_PER_JOB=4 # of memory, which the compiler needs for one of its files

fail() {
    echo "setup: $*" >&2
    exit 1
}

# As 3.12; nothing if it does not run, as a shim of pyenv may not. Builds without wheels, free-threaded ones and those for
# debugging, have a letter after it.
version_of() {
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2] + sys.abiflags)' </dev/null 2>/dev/null || true
}

accepted() {
    [ "$1" = 3.12 ] || [ "$1" = 3.13 ]
}

# The Pythons of this machine, best first.
candidates() {
    local name pyenv=${PYENV_ROOT:-$HOME/.pyenv}
    for name in python3.12 python3.13 python3; do
        type -aP $name || true
    done
    for name in 3.12 3.13; do
        compgen -G "$pyenv/versions/$name*/bin/python" | sort -rV || true
    done
    for name in 3.12 3.13; do
        uv python find --managed-python --no-python-downloads $name 2>/dev/null || true
    done
}

find_python() {
    while read -r PYTHON; do
        VERSION=$(version_of "$PYTHON")
        ! accepted "$VERSION" || return 0
    done < <(candidates)
    fail "no Python 3.12 or 3.13 on PATH, under pyenv or uv; install one (apt-get install python3.12 python3.12-venv python3.12-dev," \
        "or uv python install 3.12), or say where it is: make setup PYTHON=/path/to/python3.12"
}

# PYTHON and its VERSION: the one that is asked for, else the environment's, else the best of this machine.
choose_python() {
    local inside=
    if [ -e $VENV/bin/python ] || [ -L $VENV/bin/python ]; then
        inside=$(version_of $VENV/bin/python)
        accepted "$inside" ||
            fail "$VENV was made with ${inside:+Python }${inside:-a Python that is gone}, 3.12 or 3.13 is needed; remove $VENV and run $AGAIN again"
    fi
    if [ -n "${PYTHON:-}" ]; then
        command -v "$PYTHON" >/dev/null ||
            fail "$PYTHON is not there; install Python 3.12 or 3.13, or say where it is: make setup PYTHON=/path/to/python3.12"
        VERSION=$(version_of "$PYTHON")
        accepted "$VERSION" ||
            fail "$PYTHON is ${VERSION:+Python }${VERSION:-no Python}, 3.12 or 3.13 is needed; say where it is: make setup PYTHON=/path/to/python3.12"
        [ "${inside:-$VERSION}" = "$VERSION" ] ||
            fail "$VENV was made with Python $inside, $PYTHON is $VERSION; remove $VENV and run $AGAIN PYTHON=$PYTHON again"
    elif [ -n "$inside" ]; then
        PYTHON=$VENV/bin/python VERSION=$inside
    else
        find_python
    fi
}

# GPU, 1 or empty; what the packages need, and the command that installs them.
choose_packages() {
    case ${GPU:-0} in
        0) GPU= ;;
        1) ;;
        *) fail "GPU=$GPU is neither 1, with the packages for GPUs, nor 0" ;;
    esac
    [ ! -f $GPU_FILE ] || GPU=1
    AGAIN="make setup${GPU:+ GPU=1}" NEED_GB=10 # installed packages and those being unpacked
    [ -z "$GPU" ] || NEED_GB=16
    [ $VENV = .venv ] || AGAIN="make test-gpu-set"
}

# INDEX, where torch comes from; empty: from where everything comes.
choose_index() {
    local installed=
    INDEX=${TORCH_INDEX:-}
    if [ -f $INDEX_FILE ]; then
        installed=$(cat $INDEX_FILE)
        INDEX=${INDEX:-$installed}
        [ "$INDEX" = "$installed" ] ||
            fail "torch in $VENV is from another index than TORCH_INDEX; remove $VENV and run $AGAIN again"
    fi
}

check_compiler() {
    local include
    command -v "${CC:-cc}" >/dev/null ||
        fail "no C compiler (${CC:-cc}); install one, for instance: apt-get install build-essential"
    [ -n "$GPU" ] || return 0
    command -v "${CXX:-c++}" >/dev/null ||
        fail "no C++ compiler (${CXX:-c++}); install one, for instance: apt-get install build-essential"
    include=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    [ -f "$include/Python.h" ] ||
        fail "$PYTHON has no headers ($include/Python.h); install them, for instance: apt-get install python$VERSION-dev"
}

check_disk() {
    local free have=0
    free=$(df -Pk . | awk 'NR == 2 { print $4 }')
    if [ -d $VENV ]; then
        have=$(du -sk $VENV | cut -f1)
    fi
    [ $((free + have)) -ge $((NEED_GB * 1024 * 1024)) ] ||
        fail "disk too full: $((free / 1024)) MB free in $PWD, $NEED_GB GB are needed; free some space and run $AGAIN again"
}

# Everything that decides what is installed, and where: a changed lock or a moved folder sets up again.
fingerprint() {
    {
        cat requirements/{base,gpu,dev,bench}.lock requirements/packages.in setup.py tools/setup_env.sh
        echo "$PWD $GPU $INDEX"
    } | sha256sum | cut -d' ' -f1
}

step() {
    local what=$1
    shift
    STEP=$((STEP + 1))
    echo "setup [$STEP/$((GPU ? 6 : 5))] $what"
    "$@" >>$LOG 2>&1 || explain
}

# One line for what pip, or venv, stumbled over.
explain() {
    local package
    if grep -qE 'No space left on device|Errno 28' $LOG; then
        fail "disk full while installing; free $NEED_GB GB in $PWD (and in the home folder, for pip's cache) and run $AGAIN again"
    elif grep -qE 'Killed signal terminated|virtual memory exhausted|Cannot allocate memory' $LOG; then
        fail "memory ran out while $COMPILED was compiled; fewer files at a time need less: $AGAIN MAX_JOBS=1"
    elif grep -qE 'ensurepip is not available|No module named ensurepip' $LOG; then
        fail "$PYTHON cannot make environments; install its venv module, for instance: apt-get install python$VERSION-venv"
    elif grep -qE 'Failed to establish a new connection|Name or service not known|Temporary failure in name resolution|ConnectTimeoutError|ReadTimeoutError|CERTIFICATE_VERIFY_FAILED|ProxyError' $LOG; then
        fail "the package index does not answer; check the network and pip's settings (PIP_INDEX_URL, PIP_CERT) and run $AGAIN again"
    fi
    if grep -qE "Failed (building wheel for|to build) '?$COMPILED" $LOG; then
        fail "$COMPILED was not compiled: $(grep -E '(error|Error): ' $LOG | head -1); the whole output is in $LOG"
    fi
    package=$(sed -nE 's/.*(No matching distribution found for|Failed building wheel for) ([^ ]*).*/\2/p' $LOG | tail -1)
    [ -z "$package" ] ||
        fail "no wheel of $package for $(uname -sm), Python $VERSION and $(getconf GNU_LIBC_VERSION); Linux x86_64 with glibc 2.34 or newer is needed, and an index that has it (${INDEX:+TORCH_INDEX, }PIP_INDEX_URL)"
    fail "pip failed: $(grep -iE 'error' $LOG | tail -1); the whole output is in $LOG"
}

pip_() {
    # torch comes as a wheel of 200 MB and more: unpacked here, on the disk that was checked, not in /tmp.
    TMPDIR=$PWD/$VENV/tmp $VENV/bin/python -m pip "$1" --disable-pip-version-check --no-input "${@:2}"
}

pip_install() {
    # Not byte-compiled: of 30,000 files a run imports a few thousand, which are compiled at their first import.
    pip_ install --no-compile "$@"
}

make_venv() {
    [ -z "$GPU" ] || touch $GPU_FILE
    $VENV/bin/python -m pip --version || "$PYTHON" -m venv $VENV
}

pin() {
    grep -hE "^$1==" requirements/{base,gpu}.lock
}

# Which packages torch needs differs between its CPU and its CUDA build, so pip reads it from torch; the locks say which
# versions. From TORCH_INDEX come torch and torchvision and nothing else.
install_torch() {
    if [ -n "$INDEX" ]; then
        pip_install --no-deps --only-binary=:all: --index-url "$INDEX" "$(pin torch)" "$(pin torchvision)" || return
    fi
    pip_install --constraint requirements/base.lock --constraint requirements/gpu.lock "$(pin torch)" "$(pin setuptools)" &&
        (umask 077 && echo "$INDEX" >$INDEX_FILE) # with the password that an address may have
}

check_build() {
    ! grep -qE '^cuda\b.*= None' $VENV/lib/python*/site-packages/torch/version.py 2>/dev/null ||
        fail "torch in $VENV is a CPU build, and GPU=1 needs one for CUDA; remove $VENV and run $AGAIN again, from another index"
}

# Everything else is pinned and taken without dependencies; only wheels, but for one small package of pure Python.
install_locks() {
    grep -hvE "^$COMPILED==" "${LOCKS[@]}" >$VENV/tmp/packages.lock
    pip_install --no-deps --only-binary=:all: --no-binary=antlr4-python3-runtime -r $VENV/tmp/packages.lock
}

# What tests and tools/bench alone import, in folders of its own: transformers behaves otherwise if it finds accelerate,
# and TransformerEngine's Python without its compiled part would be half an installation, over which Megatron's import
# stumbles in every process; te_cpu imports it from there.
install_aside() {
    pip_install --no-deps --only-binary=:all: --upgrade --target $VENV/compared -r requirements/bench.lock || return
    [ -n "$GPU" ] ||
        pip_install --no-deps --only-binary=:all: --upgrade --target $VENV/$ENGINE "$(pin $ENGINE)"
}

# Compiled once for this torch, with the headers that came as wheels. Not through pip's cache, which would give what was
# compiled for another torch. In a git repository, as here, its version would get the repository's commit.
install_compiled() {
    local wheels name
    wheels=build/wheels/$(pin torch) name=$(pin $COMPILED)
    name=${name//-/_}
    compgen -G "$wheels/${name/==/-}-cp${VERSION/./}-*.whl" ||
        PATH=$PWD/$VENV/bin:$PATH NVTE_BUILD_USE_NVIDIA_WHEELS=1 NVTE_NO_LOCAL_VERSION=1 \
            MAX_JOBS=${MAX_JOBS:-$(jobs_at_once)} pip_ wheel --verbose --no-cache-dir --no-deps --no-build-isolation \
            --wheel-dir $wheels "$(pin $COMPILED)" || return
    pip_install --no-deps --no-index --find-links $wheels "$(pin $COMPILED)"
}

jobs_at_once() {
    local fit
    fit=$(awk -v each=$GB_PER_JOB '$1 == "MemAvailable:" { print int($2 / 1024 / 1024 / each) }' /proc/meminfo)
    echo $((fit < 1 ? 1 : fit < $(nproc) ? fit : $(nproc)))
}

choose_packages
choose_python
choose_index
WANTED=$(fingerprint) # now: what changes meanwhile is not what is installed
if [ -f $STAMP ] && [ "$(cat $STAMP)" = "$WANTED" ]; then
    exit 0
fi
check_compiler
check_disk
LOCKS=(requirements/{base,dev}.lock)
[ -z "$GPU" ] || LOCKS+=(requirements/gpu.lock)
STEP=0
mkdir -p $VENV/tmp
: >$LOG
step "environment in $VENV, Python $VERSION" make_venv
step "$(pin torch) and its dependencies" install_torch
[ -z "$GPU" ] || check_build
step "$(cat "${LOCKS[@]}" | grep -c '==') pinned packages" install_locks
step "what only tests and comparisons import" install_aside
if [ -n "$GPU" ]; then
    step "$(pin $COMPILED), compiled if build/wheels does not have it (20 minutes on two cores)" install_compiled
fi
step "megatron-collab" pip_install --no-deps --no-build-isolation -e .
rm -rf $VENV/tmp
echo "$WANTED" >$STAMP
echo "setup: done; python is $VENV/bin/python, what was found: $VENV/bin/megatron-collab doctor"
