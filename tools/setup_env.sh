#!/usr/bin/env bash
# Makes .venv in the current folder: Python 3.11, torch, the locks of requirements/, this project.
#
# Run again it installs nothing; interrupted it goes on. What stands in the way is said in one line that
# begins with "setup:", and the exit code is 1. pip's own output goes to .venv/setup.log.
set -euo pipefail

PYTHON=${PYTHON:-python3.11}
VENV=.venv
LOG=$VENV/setup.log
STAMP=$VENV/setup.stamp
NEED_GB=6 # installed packages, unpacking, and the CUDA build of torch where the index gives it

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
            fail "$VENV was made with ${version:-a Python that is gone}, 3.11 is needed; remove $VENV and run make setup again"
    fi
}

check_compiler() {
    command -v "${CC:-cc}" >/dev/null ||
        fail "no C compiler (${CC:-cc}); install one, for instance: apt-get install build-essential"
}

check_disk() {
    local free have=0
    free=$(df -Pk . | awk 'NR == 2 { print $4 }')
    if [ -d $VENV ]; then
        have=$(du -sk $VENV | cut -f1)
    fi
    [ $((free + have)) -ge $((NEED_GB * 1024 * 1024)) ] ||
        fail "disk too full: $((free / 1024)) MB free in $PWD, $NEED_GB GB are needed; free some space and run make setup again"
}

# Everything that decides what is installed, and where: a changed lock or a moved folder sets up again.
fingerprint() {
    { cat requirements/cpu.lock requirements/dev.lock setup.py tools/setup_env.sh; pwd; } | sha256sum | cut -d' ' -f1
}

step() {
    local number=$1 what=$2
    shift 2
    echo "setup [$number/4] $what"
    "$@" >>$LOG 2>&1 || explain
}

# One line for what pip, or venv, stumbled over.
explain() {
    local package
    if grep -qE 'No space left on device|Errno 28' $LOG; then
        fail "disk full while installing; free $NEED_GB GB in $PWD (and in the home folder, for pip's cache) and run make setup again"
    elif grep -qE 'ensurepip is not available|No module named ensurepip' $LOG; then
        fail "$PYTHON cannot make environments; install its venv module, for instance: apt-get install python3.11-venv"
    elif grep -qE 'Failed to establish a new connection|Name or service not known|Temporary failure in name resolution|ConnectTimeoutError|ReadTimeoutError|CERTIFICATE_VERIFY_FAILED|ProxyError' $LOG; then
        fail "the package index does not answer; check the network and pip's settings (PIP_INDEX_URL, PIP_CERT) and run make setup again"
    fi
    package=$(sed -nE 's/.*(No matching distribution found for|Failed building wheel for) ([^ ]*).*/\2/p' $LOG | tail -1)
    [ -z "$package" ] ||
        fail "no wheel of $package for $(uname -sm), Python 3.11 and $(getconf GNU_LIBC_VERSION); Linux x86_64 with glibc 2.34 or newer is needed, and an index that has it (PIP_INDEX_URL)"
    fail "pip failed: $(grep -iE 'error' $LOG | tail -1); the whole output is in $LOG"
}

pip_install() {
    # torch comes as a wheel of 200 MB and more: unpacked here, on the disk that was checked, not in /tmp.
    # Not byte-compiled: of 30,000 files a run imports a few thousand, which are compiled at their first import.
    TMPDIR=$PWD/$VENV/tmp "$VENV/bin/python" -m pip install --disable-pip-version-check --no-input --no-compile "$@"
}

make_venv() {
    "$VENV/bin/python" -m pip --version || "$PYTHON" -m venv $VENV
}

pin() {
    grep -E "^$1==" requirements/cpu.lock
}

if [ -f $STAMP ] && [ "$(cat $STAMP)" = "$(fingerprint)" ]; then
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
# Everything else is pinned and taken without dependencies; only wheels, but for one small package of pure Python.
step 3 "$(cat requirements/cpu.lock requirements/dev.lock | grep -c '==') pinned packages" pip_install --no-deps \
    --only-binary=:all: --no-binary=antlr4-python3-runtime -r requirements/cpu.lock -r requirements/dev.lock
step 4 "megatron-collab" pip_install --no-deps --no-build-isolation -e .
rm -rf $VENV/tmp
fingerprint >$STAMP
echo "setup: done; python is $VENV/bin/python, what was found: $VENV/bin/python tools/doctor.py"
