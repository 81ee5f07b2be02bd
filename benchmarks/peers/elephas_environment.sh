#!/usr/bin/env bash
# Creates (once) the environment that the elephas peer needs, about 3.7 GB, and prints its python.
# usage: elephas_environment.sh [FOLDER]    default: ~/.cache/sparkdl-benchmarks/elephas
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
folder="${1:-$HOME/.cache/sparkdl-benchmarks/elephas}"
requirements="$here/elephas_requirements.txt"

# The copy of the requirements is written last: it marks a complete installation of just these.
if ! cmp --silent "$requirements" "$folder/installed.txt"; then
    "${PYTHON:-python3}" -m venv --clear "$folder" >&2
    "$folder/bin/python" -m pip install --quiet --requirement "$requirements" >&2
    cp "$requirements" "$folder/installed.txt"
fi
echo "$folder/bin/python"
