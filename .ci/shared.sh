# Sourced by `run` and `nightly`: a copy of the tracked files to work in, README's command in its two halves, and `check`.
# shellcheck shell=bash
set -euo pipefail

export PYTHONUNBUFFERED=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
export PIP_NO_COMPILE=1 # most installed modules are never imported
unset PYTHONDONTWRITEBYTECODE # those that are, are compiled once, not by every process of a test
cd "$(dirname "${BASH_SOURCE[0]}")/.."
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
copy=$place/purestep
mkdir "$copy"

# A file that was never added is not there: forgetting one fails here, not after a push.
git -c safe.directory="$PWD" ls-files -z | while IFS= read -r -d '' file; do
  if [[ -e $file ]]; then cp --parents -P "$file" "$copy"; fi
done
cd "$copy"

failed=()
check() { # name, command: all of them run, whatever the first ones say
  printf '\n== %s (%ds): %s\n' "$1" "$SECONDS" "$2"
  bash -euo pipefail -c "$2" </dev/null || failed+=("$1")
}

command=$(grep -m1 '^python3 -m venv .venv-test' README.md)
install=${command%% && .venv-test/bin/python -m*}
tests=${command/"$install && "/}

ended() {
  if ((${#failed[@]})); then
    printf '\n== %ds: failed: %s\n' "$SECONDS" "${failed[*]}"
    exit 1
  fi
  printf '\n== %ds: all checks passed\n' "$SECONDS"
}
