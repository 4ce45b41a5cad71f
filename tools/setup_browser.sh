#!/usr/bin/env bash
# Installs Chromium, which tests/view/test_*page.py starts, unless it is on PATH. Needs root and Debian's package manager.
set -euo pipefail
command -v chromium >/dev/null || {
    apt-get -qq -o Acquire::Retries=3 update
    apt-get -qq -o Acquire::Retries=3 install --yes --no-install-recommends chromium >/dev/null
}
echo "setup_browser: $(command -v chromium)"
