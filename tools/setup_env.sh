#!/usr/bin/env bash
# Makes .venv in the current folder: Python 3.11, torch, the locks of requirements/, this project.
#
# GPU=1 installs the set for GPUs, with TransformerEngine; an environment keeps the set that it was made with.
# MAX_JOBS is how many files of TransformerEngine are compiled at a time, VENV another folder than .venv.
#
# Run again it installs nothing; interrupted it goes on. What stands in the way is said in one line that
# begins with "setup:", and the exit code is 1. pip's own output goes to .venv/setup.log.
set -euo pipefail

PYTHON=${PYTHON:-python3.11}
VENV=${VENV:-.venv}
LOG=$VENV/setup.log
STAMP=$VENV/setup.stamp
SET_FILE=$VENV/setup.set # which set it is: cpu or gpu
ENGINE=transformer-engine
COMPILED=$ENGINE-torch # exists as source only
GB_PER_JOB=4 # of memory, which the compiler needs for one of its files

fail() {
    echo "setup: $*" >&2
    exit 1
}

version_of() {
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true
}

check_python() {
    command -v "$PYTHON" >/dev/null ||
        fail "$PYTHON is not there; install Python 3.11, or say where it is: make setup PYTHON=/path/to/python3.11"
    local version
    version=$(version_of "$PYTHON")
    [ "$version" = 3.11 ] ||
        fail "$PYTHON is ${version:-no} Python, 3.11 is needed; say where it is: make setup PYTHON=/path/to/python3.11"
    if [ -x $VENV/bin/python ]; then
        version=$(version_of $VENV/bin/python)
        [ "$version" = 3.11 ] ||
            fail "$VENV was made with ${version:-a Python that is gone}, 3.11 is needed; remove $VENV and run $AGAIN again"
    fi
}

# SET, the one that is asked for, else the one that is there; what it needs, and the command that makes it.
choose_set() {
    local there=
    if [ -f $SET_FILE ]; then
        there=$(cat $SET_FILE)
    elif [ -f $STAMP ]; then
        there=cpu # made before there was another
    fi
    case ${GPU:-} in
        '') SET=${there:-cpu} ;;
        0) SET=cpu ;;
        1) SET=gpu ;;
        *) fail "GPU=$GPU is neither 1, the set for GPUs, nor 0, the one for CPUs" ;;
    esac
    AGAIN="make setup" NEED_GB=6 # installed packages, unpacking, and the CUDA build of torch where the index gives it
    if [ $SET = gpu ]; then
        AGAIN="make setup GPU=1" NEED_GB=16
    fi
    [ $VENV = .venv ] || AGAIN="make test-gpu-set"
    [ "${there:-$SET}" = $SET ] ||
        fail "$VENV holds the set for ${there^^}s; remove $VENV and run $AGAIN again"
}

check_compiler() {
    local include
    command -v "${CC:-cc}" >/dev/null ||
        fail "no C compiler (${CC:-cc}); install one, for instance: apt-get install build-essential"
    [ $SET = gpu ] || return 0
    command -v "${CXX:-c++}" >/dev/null ||
        fail "no C++ compiler (${CXX:-c++}); install one, for instance: apt-get install build-essential"
    include=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    [ -f "$include/Python.h" ] ||
        fail "$PYTHON has no headers ($include/Python.h); install them, for instance: apt-get install python3.11-dev"
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
    { cat "${LOCKS[@]}" requirements/bench.lock setup.py tools/setup_env.sh; pwd; } | sha256sum | cut -d' ' -f1
}

step() {
    local number=$1 what=$2
    shift 2
    echo "setup [$number/5] $what"
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
        fail "$PYTHON cannot make environments; install its venv module, for instance: apt-get install python3.11-venv"
    elif grep -qE 'Failed to establish a new connection|Name or service not known|Temporary failure in name resolution|ConnectTimeoutError|ReadTimeoutError|CERTIFICATE_VERIFY_FAILED|ProxyError' $LOG; then
        fail "the package index does not answer; check the network and pip's settings (PIP_INDEX_URL, PIP_CERT) and run $AGAIN again"
    fi
    if grep -qE "Failed (building wheel for|to build) '?$COMPILED" $LOG; then
        fail "$COMPILED was not compiled: $(grep -E '(error|Error): ' $LOG | head -1); the whole output is in $LOG"
    fi
    package=$(sed -nE 's/.*(No matching distribution found for|Failed building wheel for) ([^ ]*).*/\2/p' $LOG | tail -1)
    [ -z "$package" ] ||
        fail "no wheel of $package for $(uname -sm), Python 3.11 and $(getconf GNU_LIBC_VERSION); Linux x86_64 with glibc 2.34 or newer is needed, and an index that has it (PIP_INDEX_URL)"
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
    $VENV/bin/python -m pip --version || "$PYTHON" -m venv $VENV && echo $SET >$SET_FILE
}

pin() {
    grep -E "^$1==" requirements/$SET.lock
}

# Everything else is pinned and taken without dependencies; only wheels, but for one small package of pure Python.
install_locks() {
    local aside=$COMPILED
    [ $SET = gpu ] || aside=$ENGINE
    grep -hvE "^$aside==" "${LOCKS[@]}" >$VENV/tmp/packages.lock
    pip_install --no-deps --only-binary=:all: --no-binary=antlr4-python3-runtime -r $VENV/tmp/packages.lock
}

# TransformerEngine's Python in a folder of its own, where te_cpu finds it: in the environment it would be half an
# installation, over which Megatron's import stumbles in every process.
install_engine() {
    pip_install --no-deps --only-binary=:all: --upgrade --target $VENV/$ENGINE "$(grep -E "^$ENGINE==" requirements/dev.lock)"
}

aside() {
    install_engine && install_compared
}

# What the tests compare losses with, likewise aside: transformers behaves otherwise where it finds accelerate.
install_compared() {
    pip_install --no-deps --only-binary=:all: --upgrade --target $VENV/compared -r requirements/bench.lock
}

# Compiled once for this torch, with the headers that came as wheels. Not through pip's cache, which would give what was
# compiled for another torch. In a git repository, as here, its version would get the repository's commit.
install_compiled() {
    local wheels name
    wheels=build/wheels/$(pin torch) name=$(pin $COMPILED)
    name=${name//-/_}
    compgen -G "$wheels/${name/==/-}-*.whl" ||
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

choose_set
LOCKS=(requirements/$SET.lock requirements/dev.lock)
WANTED=$(fingerprint) # now: what changes meanwhile is not what is installed
if [ -f $STAMP ] && [ "$(cat $STAMP)" = "$WANTED" ]; then
    exit 0
fi
check_python
check_compiler
check_disk
mkdir -p $VENV/tmp
: >$LOG
step 1 "environment in $VENV" make_venv
# torch first, with what it depends on: which packages those are differs between its CPU and its CUDA build.
step 2 "$(pin torch) and its dependencies" pip_install "$(pin torch)" "$(pin setuptools)"
step 3 "$(cat "${LOCKS[@]}" | grep -c '==') pinned packages" install_locks
if [ $SET = gpu ]; then
    step 4 "$(pin $COMPILED), compiled where build/wheels does not have it (20 minutes on two cores)" install_compiled
else
    step 4 "the Python of $ENGINE and what losses are compared with, for tests" aside
fi
step 5 "megatron-collab" pip_install --no-deps --no-build-isolation -e .
rm -rf $VENV/tmp
echo "$WANTED" >$STAMP
echo "setup: done; python is $VENV/bin/python, what was found: $VENV/bin/python tools/doctor.py"
