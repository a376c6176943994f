#!/usr/bin/env bash
# Install into .venv; then train by tools/start.py (see ./run.sh --help), or test (./run.sh test).
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"  # sh run.sh
set -euo pipefail
script=$(readlink -f -- "$0" 2> /dev/null || echo "$0")  # which may be called by a link
CDPATH='' cd -- "$(dirname -- "$script")"
export OLDPWD  # where start.py looks for what is not here

# Of other programs: modules with the names of ours, another library, another place to install into.
unset PYTHONPATH PYTHONSAFEPATH PYTHONHOME PYTHONPLATLIBDIR __PYVENV_LAUNCHER__
unset PIP_USER PIP_TARGET PIP_PREFIX
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}  # for a checkpoint
export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2,SIGXCPU  # by torchrun
export TORCHINDUCTOR_VEC_ISA_OK=${TORCHINDUCTOR_VEC_ISA_OK:-1}  # no trial builds: 10 s at first
# Compiled code is kept here, for each kind of CPU that shares this folder: a reboot empties /tmp.
cpu=$({ grep -m 1 -E '^(flags|Features)' /proc/cpuinfo 2> /dev/null || uname -m; } | cksum)
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$PWD/.venv/compiled/${cpu%% *}}

fail() {
  echo "run.sh: $*" >&2
  exit 1
}
if command -v flock > /dev/null && exec 9< run.sh && ! flock -n 9; then
  echo "waiting for another ./run.sh, which installs" && flock 9 || true
fi
python=.venv/bin/python
$python -c '' 2> /dev/null || python=${PYTHON:-python3}  # None is there, or a broken one.
"$python" -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' 2> /dev/null ||
  fail "Python 3.11 to 3.14 is needed, and $python is" \
    "$("$python" --version 2> /dev/null || echo not there); install one, delete .venv if it is" \
    "there, and name it: PYTHON=python3.12 ./run.sh"
case ${1:-} in
  --help | -h) exec "$python" tools/start.py --help ;;
  test) packages=requirements-dev.txt ;;
  *) packages=requirements.txt && "$python" tools/start.py --check "$@" ;;  # before installing
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
  if [ "$(uname -sm)" = "Linux x86_64" ] && ! command -v nvidia-smi > /dev/null; then
    "${pip[@]}" --no-deps --retries 0 --timeout 20 "$(grep '^torch=' requirements.txt)" \
      --index-url https://download.pytorch.org/whl/cpu 2> /dev/null ||  # without gigabytes of CUDA
      echo "the CPU build of PyTorch cannot be fetched: installing the usual one"
  fi
  "${pip[@]}" -r "$packages" || fail "pip could not install $packages; its messages above say why"
  touch "$stamp"
fi
[ "${1:-}" = test ] || exec .venv/bin/python tools/start.py "$@" 9<&-
export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-1000}  # Tests run side by side: tools/common.py
exec .venv/bin/python -m pytest -q -rs tests -n auto --dist loadfile --no-loadscope-reorder \
  -m "not slow and not gpu" "${@:2}" 9<&-  # the last -m counts
