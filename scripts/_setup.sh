# Sourced by scripts/lab, test, build and bench: finds a Python, makes or renews .venv, activates it.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)

# Beside the notebooks that a script is started on may lie a stranger's json.py. `python -m` and
# `python -c` import from the working folder: our scripts say -P. An empty or relative entry of
# PYTHONPATH leads there too: only absolute ones are kept.
absolute_entries() {
  local entry kept="" entries=()
  IFS=: read -r -a entries <<<"${PYTHONPATH:-}"
  for entry in ${entries[@]+"${entries[@]}"}; do
    case $entry in /*) kept="$kept${kept:+:}$entry" ;; esac
  done
  echo "$kept"
}
export PYTHONPATH
PYTHONPATH=$(absolute_entries)

# Any Python will do to start _setup.py, which looks for a fitting one itself.
any_python() {
  local candidate recent="import sys; sys.exit(sys.version_info < (3, 6))"
  for candidate in "$root/.venv/bin/python" "${PYTHON:-}" \
    python3 python3.14 python3.13 python3.12 python3.11; do
    if [ -n "$candidate" ] && "$candidate" -c "$recent" >/dev/null 2>&1; then
      echo "$candidate"
      return
    fi
  done
  echo "No Python was found: install Python 3.11 or newer, or set PYTHON to one, and run this again." >&2
  return 1
}

# check_arguments MODULE ARGUMENTS: --help and bad arguments are answered here, before any set-up.
check_arguments() {
  local python code=0
  python=$(any_python) || exit 1
  "$python" "$root/scripts/_check_arguments.py" "$@" || code=$?
  case $code in
    0) ;;
    100) exit 0 ;; # --help was answered
    *) exit $code ;;
  esac
}

set_up() {
  local python
  python=$(any_python) || exit 1
  "$python" "$root/scripts/_setup.py" || exit $?
  export VIRTUAL_ENV="$root/.venv" PATH="$root/.venv/bin:$PATH"
}
