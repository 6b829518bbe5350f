#!/usr/bin/env bash
# Sets everything up and runs the tests.
#
#   bash scripts/test.sh                      what CI runs
#   bash scripts/test.sh --all                with the slow tests
#   bash scripts/test.sh --examples           every example and arrangement learns its toy task
#   bash scripts/test.sh --dry-run            only says what it would run
#   bash scripts/test.sh tests/utils -k data  other arguments go to pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE # without .pyc files every process that a test starts is three times slower

usage() {
  cat <<'HELP'
usage: bash scripts/test.sh [--all | --examples] [--dry-run] [PYTEST ARGUMENTS...]

Installs what is missing (scripts/install.sh), then runs the tests that need no GPU.

  --all       the slow tests too
  --examples  nothing but the trainings by which every example, and every arrangement of the quick start, learns its toy
              task; --all has none of them
  --dry-run   print the commands that it would run, and end
  other arguments are given to pytest, for example: tests/rollout -k abort -x; without any, two test files run at a time
HELP
}

marks="not slow and not gpu and not learns"
pytest_arguments=()
dry_run=""
for argument in "$@"; do
  case "$argument" in
    -h | --help)
      usage
      exit 0
      ;;
    --all) marks="not gpu and not learns" ;;
    --examples) marks="learns" ;;
    --dry-run) dry_run=1 ;;
    *) pytest_arguments+=("$argument") ;;
  esac
done

pytest_command=(.venv/bin/python -m pytest -m "$marks")
if ((${#pytest_arguments[@]})); then
  pytest_command+=("${pytest_arguments[@]}")
else
  # Two files at a time: most tests leave one of two cores idle, or wait for servers.
  pytest_command+=(-n 2 --dist loadfile --no-loadscope-reorder)
fi
if [[ -n "$dry_run" ]]; then
  echo "bash scripts/install.sh"
  printf 'SLIME_ACCELERATOR=cpu OMP_NUM_THREADS=%s' "${OMP_NUM_THREADS:-1}"
  printf ' %q' "${pytest_command[@]}"
  echo
  exit 0
fi

bash scripts/install.sh
# One thread per process: the tests start many processes, and threads of several on the same cores only hinder each other.
export SLIME_ACCELERATOR=cpu # also where a GPU is present: the pinned set has CPU builds
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "${pytest_command[@]}"
