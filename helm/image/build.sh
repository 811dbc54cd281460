#!/bin/sh
# The steps that images are built by; `make` and the tests run the same ones.
#
#   build.sh dist FOLDER              Baton's sdist, and its wheel, built from that
#   build.sh dependencies LOCK ROOT   a virtual environment with what a lock names
#   build.sh baton ROOT FOLDER        Baton's wheel into it, and nothing else
#
# What is installed has the hashes of the locks beside this file. Torch for CPUs is not on PyPI, so
# that of `worker-cpu` comes from where TORCH_INDEX says, by its version alone.
set -eu

image=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}

install() { # ROOT ARGUMENT...: into a virtual environment that has no pip of its own
  into=$1
  shift
  "$python" -m pip --python "$into/bin/python" install --quiet --disable-pip-version-check --no-deps "$@"
}

dependencies() { # LOCK ROOT
  "$python" -m venv --without-pip "$2"
  install "$2" --require-hashes --only-binary :all: -r "$image/$1.txt"
  case $1 in
  router) "$python" "$image/strip.py" "$2" ;;
  *-cpu) install "$2" ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} -r "$image/torch-cpu.txt" ;;
  esac
}

case $1 in
dist)
  tools=$(mktemp -d)
  trap 'rm -rf "$tools"' EXIT
  dependencies build "$tools"
  "$tools/bin/python" -m build --no-isolation --outdir "$2" "$image/../.."
  ;;
dependencies) dependencies "$2" "$3" ;;
baton) install "$2" "$3"/baton_serve-*.whl ;;
*)
  sed -n '2,/^set/{/^#/p;}' "$0" >&2
  exit 2
  ;;
esac
