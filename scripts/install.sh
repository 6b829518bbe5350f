#!/usr/bin/env bash
# Makes .venv with the pinned CPU set and this package. Run it again at any time: without a change it returns at once.
#
#   bash scripts/install.sh
#   PYTHON=/path/to/python3.11 bash scripts/install.sh
#   bash scripts/install.sh --dry-run           only says what it would run
set -euo pipefail
unset PYTHONDONTWRITEBYTECODE # without .pyc files every process of a run starts three times slower

readonly WANTED_PYTHON=3.11
readonly WANTED_GLIBC=2.34

cd "$(dirname "${BASH_SOURCE[0]}")/.."
readonly ROOT="$PWD" VENV="$PWD/.venv" REQUIREMENTS=requirements/cpu.txt
# Outside of site-packages: there Megatron would import it, and fail for want of its CUDA libraries.
readonly LAYERS=requirements/transformer-engine.txt LAYERS_TARGET=.venv/transformer-engine
readonly STAMP="$VENV/installed.sha256" LOG="$VENV/install.log"

say() { printf 'install: %s\n' "$*"; }

refuse() {
  printf 'install: %s\n' "$@" >&2
  exit 2
}

usage() {
  cat <<HELP
usage: bash scripts/install.sh [--dry-run]

Makes .venv from $REQUIREMENTS and installs this package into it (editable). A second run is instant.
Needs Linux x86-64, glibc $WANTED_GLIBC or newer, Python $WANTED_PYTHON and a package index for the first run.

  --dry-run  look at this machine, print the commands that it would run, and end

Environment variables:
  PYTHON  interpreter to use; else python$WANTED_PYTHON, else python3

Where packages come from is pip's business (pip.conf, PIP_INDEX_URL, PIP_EXTRA_INDEX_URL). An index without CPU builds of
torch gives a CUDA build, which brings its CUDA packages along: several GB more.
HELP
}

check_platform() {
  local system machine libc
  system="$(uname -s)" machine="$(uname -m)"
  if [[ "$system $machine" != "Linux x86_64" ]]; then
    refuse "this machine is $system $machine; the pinned CPU set supports Linux x86_64." \
      "On another platform run it in a Linux x86_64 container or virtual machine (for example the image python:$WANTED_PYTHON)."
  fi
  libc="$(getconf GNU_LIBC_VERSION 2>/dev/null || true)"
  if [[ -z "$libc" ]] || [[ "$(printf '%s\n' "$WANTED_GLIBC" "${libc#glibc }" | sort -V | head -n 1)" != "$WANTED_GLIBC" ]]; then
    refuse "C library: ${libc:-not glibc}; the engine's wheel needs glibc $WANTED_GLIBC or newer." \
      "Use a newer distribution (Debian 12, Ubuntu 22.04, Fedora 35 or later) or a container of one."
  fi
}

python_version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || echo none; }

# Prints the interpreter to use.
find_python() {
  local candidate version candidates=("python$WANTED_PYTHON" python3) found=()
  if [[ -n "${PYTHON:-}" ]]; then candidates=("$PYTHON"); fi
  for candidate in "${candidates[@]}"; do
    version="$(python_version "$candidate")"
    if [[ "$version" == "$WANTED_PYTHON" ]]; then
      if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
        echo "$candidate"
        return
      fi
      version="$version without venv (Debian and Ubuntu: apt install python$WANTED_PYTHON-venv)"
    fi
    found+=("$candidate: $version")
  done
  refuse "Python $WANTED_PYTHON is supported, and was not found. Looked at: $(IFS=';' && echo "${found[*]}")." \
    "Install Python $WANTED_PYTHON (system package, pyenv, uv or conda) and run: PYTHON=/path/to/python$WANTED_PYTHON bash scripts/install.sh"
}

# What an installation depends on: the place (scripts in .venv hold its path), the pins, and the package's metadata
# (without the settings of lint and tests, which stand last in the file).
fingerprint() {
  { echo "$ROOT" && cat "$REQUIREMENTS" "$LAYERS" && sed '/^\[tool\.ruff/,$d' pyproject.toml; } | sha256sum | cut -d ' ' -f 1
}

make_venv() {
  local python version
  if [[ -e "$VENV/bin/python" ]]; then
    version="$(python_version "$VENV/bin/python")"
    if [[ "$version" != "$WANTED_PYTHON" ]]; then
      refuse "$VENV holds Python $version, not $WANTED_PYTHON. Move it away or remove it, and run this again."
    fi
  else
    python="$(find_python)"
    say "making .venv with $python"
    "$python" -m venv "$VENV"
  fi
  if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then "$VENV/bin/python" -m ensurepip >>"$LOG" 2>&1; fi
}

# Reads pip's output and prints a line of progress now and then.
show_progress() {
  local total="$1" count=0 line
  while IFS= read -r line; do
    case "$line" in
      # "Processing" instead of "Collecting" is what pip says of an index that is a directory.
      Collecting\ * | Processing\ */*.whl* | "Requirement already satisfied: "*)
        count=$((count + 1))
        if ((count % 20 == 0)); then say "  $count of $total packages fetched"; fi
        ;;
      "Installing collected packages"*)
        if ((total > 1)); then say "  unpacking"; fi
        ;;
    esac
  done
}

# Everything is installed with --no-deps: the pins are the whole set.
run_pip_install() { "$VENV/bin/python" -m pip --disable-pip-version-check install --no-deps "$@"; }

quiet_pip_install() { run_pip_install "$@" >>"$LOG" 2>&1; }

pip_install() {
  local total="$1"
  shift
  if ! run_pip_install "$@" 2>&1 | tee -a "$LOG" | show_progress "$total"; then
    tail -n 5 "$LOG" >&2
    printf 'install: failed; the whole output is in %s. Run this again when the cause is gone.\n' "$LOG" >&2
    exit 1
  fi
}

torch_pin() { grep -E '^torch==' "$REQUIREMENTS"; }

# A CPU build is asked for by its full name first; an index that has none may still have one under the plain name, which
# the whole set then asks for.
prefer_cpu_torch() { quiet_pip_install "$(torch_pin)+cpu" || true; }

# An index without CPU builds gives a CUDA build, which does not start without the CUDA packages that this set leaves out.
# They are fetched then, so that a machine with nothing but such an index still gets a working environment.
complete_torch() {
  if torch_starts; then return; fi
  say "the index gave a CUDA build of torch: fetching its CUDA packages, several GB"
  say "  (PIP_EXTRA_INDEX_URL with an index that has CPU builds of torch avoids that: remove .venv and run this again)"
  if ! "$VENV/bin/python" -m pip --disable-pip-version-check install "$(torch_pin)" >>"$LOG" 2>&1; then
    tail -n 5 "$LOG" >&2
    printf 'install: failed; the whole output is in %s. Run this again when the cause is gone.\n' "$LOG" >&2
    exit 1
  fi
}

torch_starts() { "$VENV/bin/python" -W ignore -c 'import torch' >>"$LOG" 2>&1; }

check_result() {
  if ! "$VENV/bin/python" -c 'import torch, slime' >>"$LOG" 2>&1; then
    tail -n 3 "$LOG" >&2
    printf 'install: %s\n' "torch or slime does not start in the new environment; the whole output is in $LOG." \
      "Remove .venv, look at pip's index settings (pip config list), and run this again." \
      "What else is wrong here, and what to do: $VENV/bin/python -m slime.doctor" >&2
    exit 1
  fi
}

# Prints the commands of an installation.
plan() {
  local python=""
  check_platform
  if [[ ! -e "$VENV/bin/python" ]]; then
    python="$(find_python)"
    printf '%q -m venv .venv\n' "$python"
  fi
  printf '.venv/bin/python -m pip install --no-deps %s\n' "$(torch_pin)+cpu" "-r $REQUIREMENTS" \
    "--target $LAYERS_TARGET --upgrade -r $LAYERS" "-e ."
}

main() {
  local dry_run=""
  case "${1:-}" in
    "") ;;
    -h | --help)
      usage
      exit 0
      ;;
    --dry-run) dry_run=1 ;;
    *) refuse "unknown argument '$1'; see bash scripts/install.sh --help" ;;
  esac
  # An explicitly chosen interpreter is checked even when there is nothing to do.
  if [[ -n "${PYTHON:-}" ]]; then find_python >/dev/null; fi
  local expected
  expected="$(fingerprint)"
  if [[ -f "$STAMP" && "$(<"$STAMP")" == "$expected" && -x "$VENV/bin/python" ]]; then
    if [[ -n "$dry_run" ]]; then say "nothing to do: .venv holds this set"; fi
    return
  elif [[ -n "$dry_run" ]]; then
    plan
    return
  fi

  check_platform
  # Two installations at once would break each other; the lock ends with this process.
  exec 9<"$ROOT"
  if command -v flock >/dev/null; then flock 9; fi
  if [[ -f "$STAMP" && "$(<"$STAMP")" == "$expected" ]]; then return; fi

  mkdir -p "$VENV"
  rm -f "$STAMP"
  : >"$LOG"
  make_venv
  # Fetched files are kept inside the repository until the installation is whole, so that a second try is cheap.
  export PIP_CACHE_DIR="${PIP_CACHE_DIR:-$VENV/pip-cache}"
  local total
  total="$(grep -c '^[^#]*==' "$REQUIREMENTS")"
  say "installing $total packages (about 460 MB to fetch, 2.7 GB on disk; some minutes)"
  prefer_cpu_torch
  pip_install "$total" -r "$REQUIREMENTS"
  complete_torch
  say "installing the Python of Transformer Engine, for tests"
  pip_install 1 --target "$LAYERS_TARGET" --upgrade -r "$LAYERS"
  say "installing slime itself"
  pip_install 1 -e .
  check_result
  # Reads the flags of the installed packages into the user's cache, so that the first --help is quick too.
  "$VENV/bin/python" train.py --help >>"$LOG" 2>&1 || true
  rm -rf "$VENV/pip-cache"
  echo "$expected" >"$STAMP"
  say "done: $VENV"
}

main "$@"
