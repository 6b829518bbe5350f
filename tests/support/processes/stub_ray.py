"""Programs that replace `ray`, and the `python` of a run, in tests of the scripts; they record their arguments. The words of
the latest submission are in STUB_LOG.submission, each followed by a null byte. If the job is a file, STUB_LOG.job is its copy.

Variables: STUB_LOG (file of calls; those of `python` are in STUB_LOG.python), STUB_START (ok, mismatch, token, deep, hang, or
slow: the second start succeeds), STUB_JOB_STATUS (exit status of the job), STUB_JOB_SECONDS (its duration), STUB_LAST_LINE
(its last line), STUB_REFUSALS (number of submissions that are refused first), STUB_REFUSAL (message of a refusal),
STUB_CHECK (output of the check of a run), STUB_CHECK_STATUS (its exit status).
"""

import sys
from pathlib import Path

_PROGRAM = """#!/usr/bin/env bash
printf '%s\\n' "$*" >>"$STUB_LOG"
if [[ "${RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER:-}" == 0 ]]; then echo "$1" >>"$STUB_LOG.alone"; fi
case "$1" in
  --version) echo "ray, version 0.0" ;;
  start)
    case "${STUB_START:-ok}" in
      mismatch) echo "RuntimeError: Version mismatch: The cluster was started with: Ray: 1.0" && exit 1 ;;
      token) echo "ray.exceptions.AuthenticationError: token is invalid" && exit 1 ;;
      deep) echo "OSError: validate_socket_filename failed: AF_UNIX path length cannot exceed 107 bytes: /x" && exit 1 ;;
      hang) exec sleep 100 ;;
      slow)
        if (($(grep -c '^start' "$STUB_LOG") < 2)); then echo "The current node timed out during startup." && exit 1; fi
        ;;
    esac
    echo "$RAY_AUTH_MODE" >"$STUB_LOG.auth"
    echo "${SLIME_HOST_IP:-}" >"$STUB_LOG.host"
    while (($#)); do if [[ "$1" == --port ]]; then port="$2"; fi; shift; done
    # As Ray does where it serves this machine alone: nothing to join is announced.
    if [[ "${RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER:-}" != 0 ]]; then echo "  ray start --address='127.0.0.1:${port:-0}'"; fi
    echo "Ray runtime started."
    exec sleep 100
    ;;
  status) printf ' 0.0/8.0 CPU\\n 0.0/4.0 GPU\\n' ;;
  job)
    if [[ "$2" == submit ]]; then
      printf '%s\\0' "$@" >"$STUB_LOG.submission"
      if [[ "${*: -2:1}" == bash ]]; then cp -p "${*: -1}" "$STUB_LOG.job"; fi
      if (($(grep -c '^job submit' "$STUB_LOG") <= ${STUB_REFUSALS:-0})); then
        echo "${STUB_REFUSAL:-No available agent to submit job}" >&2 && exit 1
      fi
      sleep "${STUB_JOB_SECONDS:-0}" >/dev/null 2>&1 &
      echo $! >"$STUB_LOG.running"
      trap 'kill $!' TERM
      wait $!
      printf '%s' "${STUB_LAST_LINE:-}"
      exit "${STUB_JOB_STATUS:-0}"
    elif [[ "$2" == stop ]]; then
      kill "$(cat "$STUB_LOG.running")"
    fi
    ;;
  get-auth-token) mkdir -p "$HOME/.ray" && echo stub-token >"$HOME/.ray/auth_token" ;;
esac
"""


_PYTHON = f"""#!/usr/bin/env bash
if [[ "$1" == -c ]]; then exec {sys.executable} "$@"; fi
"""
_PYTHON += """printf '%s\\n' "$*" >>"$STUB_LOG.python"
echo "INFO: said beside the result" >&2
if ((${STUB_CHECK_STATUS:-0})); then echo "ERROR: --lr 0: refused" >&2 && exit "$STUB_CHECK_STATUS"; fi
echo "${STUB_CHECK-ready; the run needs 4 GPUs}"
"""


def make_stub_ray(directory: Path) -> dict[str, str]:
    """Write the programs. Returns the variables that make the scripts use them, with a home and directories of their own."""
    program, python = directory / "ray", directory / "python-of-the-run"
    for path, text in ((program, _PROGRAM), (python, _PYTHON)):
        path.write_text(text)
        path.chmod(0o755)
    return {
        "RAY": str(program),
        "PYTHON": str(python),
        "STUB_LOG": str(directory / "calls"),
        "HOME": str(directory),
        "TMPDIR": str(directory),
        "RAY_TMPDIR": str(directory),
        "CLUSTER_DIR": str(directory / "cluster"),
    }


def calls(variables: dict[str, str]) -> list[str]:
    """The calls so far, one line each."""
    log = Path(variables["STUB_LOG"])
    return log.read_text().splitlines() if log.exists() else []
