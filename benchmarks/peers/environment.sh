#!/usr/bin/env bash
# Creates (once) the environment that a peer needs beside ours, and prints its python.
# usage: environment.sh elephas|petastorm [FOLDER]    default: ~/.cache/sparkdl-benchmarks/PEER
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
peer="$1"
folder="${2:-$HOME/.cache/sparkdl-benchmarks/$peer}"
requirements="$here/${peer}_requirements.txt"
options=()
if [ "$peer" = petastorm ]; then options=(--no-deps); fi

# The copy of the requirements is written last: it marks a complete installation of just these.
if ! cmp --silent "$requirements" "$folder/installed.txt"; then
    "${PYTHON:-python3}" -m venv --clear "$folder" >&2
    "$folder/bin/python" -m pip install --quiet "${options[@]}" --requirement "$requirements" >&2
    cp "$requirements" "$folder/installed.txt"
fi
echo "$folder/bin/python"
