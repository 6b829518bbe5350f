#!/usr/bin/env bash
# Sets everything up and runs the tests.
#
#   bash scripts/test.sh                      what CI runs
#   bash scripts/test.sh --all                with the slow tests
#   bash scripts/test.sh tests/utils -k data  other arguments go to pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE # without .pyc files every process that a test starts is three times slower

usage() {
  cat <<'HELP'
usage: bash scripts/test.sh [--all] [PYTEST ARGUMENTS...]

Installs what is missing (scripts/install.sh), then runs the tests that need no GPU.

  --all   the slow tests too
  other arguments are given to pytest, for example: tests/rollout -k abort -x
HELP
}

marks="not slow and not gpu"
pytest_arguments=()
for argument in "$@"; do
  case "$argument" in
    -h | --help)
      usage
      exit 0
      ;;
    --all) marks="not gpu" ;;
    *) pytest_arguments+=("$argument") ;;
  esac
done

bash scripts/install.sh
# One thread per process: the tests start many processes, and threads of several on the same cores only hinder each other.
export SLIME_ACCELERATOR=cpu # also where a GPU is present: the pinned set has CPU builds
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec .venv/bin/python -m pytest -m "$marks" ${pytest_arguments[@]+"${pytest_arguments[@]}"}
