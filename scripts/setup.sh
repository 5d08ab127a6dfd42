#!/bin/sh
# Make a virtual environment with tqd and the MLX build of this machine: setup.sh PYTHON VENV runtime|dev
set -eu
python=$1 venv=$2 what=$3

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "tqd needs Python 3.11 or newer; $("$python" --version) is older. Try: make PYTHON=python3.12" >&2
    exit 1
}
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"

# macOS: the plain wheel brings Metal. Linux: CUDA where a driver answers, else the CPU.
extra=
if [ "$(uname -s)" = Linux ]; then
    extra='[cpu]'
    if driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1) && [ -n "$driver" ]; then
        if [ "${driver%%.*}" -ge 580 ]; then extra='[cuda13]'; else extra='[cuda12]'; fi
    fi
fi

# debian PACKAGE CONSEQUENCE: install it where that is ours to do, else say what goes without it
debian() {
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "installing Debian's $1"
        { apt-get update -qq && apt-get install -y -qq --no-install-recommends "$1"; } >/dev/null ||
            echo "could not install $1: $2" >&2
    else
        echo "note: without $1 $2" >&2
    fi
}

if [ "$extra" = '[cpu]' ] && ! ls /usr/lib/*/openblas-pthread/libopenblas.so.0 >/dev/null 2>&1; then
    debian libopenblas0-pthread "the demo model reads prompts about 19 times slower on a CPU"
fi
if [ "$what" = dev ] && ! { command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null 2>&1; then
    debian chromium "the tests of the dashboard are skipped"
fi

# The tests run Metal's kernels on a CPU emulation, which needs clang 16 or newer; without it they are skipped.
if [ "$what" = dev ] && [ "$(uname -sm)" = 'Linux x86_64' ] && ! ls /usr/bin/clang++-1[6-9] /usr/bin/clang++-2? >/dev/null 2>&1; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "installing clang for the tests of Metal's kernels"
        { apt-get update -qq && { apt-get install -y -qq --no-install-recommends clang-19 || apt-get install -y -qq --no-install-recommends clang-16; }; } >/dev/null 2>&1 ||
            echo "could not install clang-19; the tests of Metal's kernels will be skipped" >&2
    else
        echo "note: with clang 16 or newer installed, the tests run Metal's kernels on a CPU emulation" >&2
    fi
fi

echo "installing tqd$extra into $venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
if [ "$what" = dev ]; then
    "$venv/bin/python" -m pip install --quiet --editable ".$extra" --group dev
else
    "$venv/bin/python" -m pip install --quiet --editable ".$extra"
fi
