#!/usr/bin/env bash
# Install into .venv; then train as tools/start.py says (./run.sh --help), or run the tests (./run.sh test).
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"  # sh run.sh
set -euo pipefail
script=$(readlink -f -- "$0" 2> /dev/null || echo "$0")  # which may be called by a link
CDPATH='' cd -- "$(dirname -- "$script")"
export OLDPWD  # where start.py looks for what is not here

# Of other programs: modules with the names of ours, another library, another place to install into.
unset PYTHONPATH PYTHONSAFEPATH PYTHONHOME PYTHONPLATLIBDIR __PYVENV_LAUNCHER__ PIP_USER PIP_TARGET PIP_PREFIX
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}  # seconds to save a checkpoint; torchrun: 30
export TORCHINDUCTOR_VEC_ISA_OK=${TORCHINDUCTOR_VEC_ISA_OK:-1}  # skips PyTorch's trial builds: 10 s at the first start
export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-1000}  # OpenMP's threads soon sleep while they wait: the cores may be busy
# What is compiled is kept here, since /tmp is empty after a reboot; one folder for each kind of CPU that shares this one.
cpu=$( (grep -m 1 -E '^(flags|Features)' /proc/cpuinfo 2> /dev/null || uname -m) | cksum | cut -d' ' -f1)
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$PWD/.venv/compiled/$cpu}

fail() {
  echo "run.sh: $*" >&2
  exit 1
}

python=.venv/bin/python
if ! $python -c '' 2> /dev/null; then  # there is none, or its interpreter is gone
  python=${PYTHON:-python3}
fi
"$python" -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' 2> /dev/null ||
  fail "Python 3.11 or newer is needed, and $python is $("$python" --version 2> /dev/null || echo not there);" \
    "delete .venv, if it is there, and name another: PYTHON=python3.12 ./run.sh"
case ${1:-} in
  --help | -h) exec "$python" tools/start.py --help ;;
  test) packages=requirements-dev.txt ;;
  *) packages=requirements.txt && "$python" tools/start.py --check "$@" ;;  # before minutes of installing
esac
if [ "$python" != .venv/bin/python ]; then
  rm -rf .venv
  trap 'rm -rf .venv' EXIT  # if it is only half made
  "$python" -m venv .venv
  trap - EXIT
fi
stamp=.venv/installed-$(cat requirements*.txt | cksum | cut -d' ' -f1)-$packages
if [ ! -e "$stamp" ]; then
  .venv/bin/python -c 'import pip' 2> /dev/null ||
    fail "this .venv has no pip: run .venv/bin/python -m ensurepip, or delete .venv"
  echo "installing $packages into .venv"
  pip=(.venv/bin/python -m pip install -q --disable-pip-version-check)
  if [ "$(uname -sm)" = "Linux x86_64" ] && ! command -v nvidia-smi > /dev/null; then  # the usual build has CUDA: gigabytes
    "${pip[@]}" --no-deps --retries 0 --timeout 20 --index-url https://download.pytorch.org/whl/cpu \
      "$(grep '^torch=' requirements.txt)" 2> /dev/null || echo "PyTorch's CPU build cannot be fetched: installing the usual one"
  fi
  "${pip[@]}" -r "$packages" || fail "pip could not install $packages into .venv; its messages above say why"
  touch "$stamp"
fi
[ "${1:-}" = test ] || exec .venv/bin/python tools/start.py "$@"
exec .venv/bin/python -m pytest -q -rs tests -n auto --dist loadfile --no-loadscope-reorder \
  -m "not slow and not gpu" "${@:2}"  # the last -m counts
