#!/bin/sh
# Brings constraints.txt and constraints-gpu.txt up to date with pyproject.toml: exact versions, for Python 3.11 and 3.12.
# Keeps the pins that are there; with --upgrade takes the newest versions. Run `make test` after.
set -eu
cd "$(dirname "$0")/.."
uv=${UV:-.bootstrap/bin/uv}
python=.venv/bin/python

compile() { # PYTHON_VERSION ARG...
    version=$1
    shift
    "$uv" pip compile --quiet --no-header --no-annotate --no-build --python "$python" --python-version "$version" "$@"
}

pin() { # FILE EXTRA UPGRADE
    file=$1 engine=$2
    all="pyproject.toml --extra $engine --extra onnx --extra stores --extra test"
    keep=
    if [ "$3" != --upgrade ] && [ -s "$file" ]; then keep="-c $file"; fi
    echo "setuptools<81" >"$file.limits" # vllm asks for it on 3.12 only
    # shellcheck disable=SC2086 # the options are words
    compile 3.11 $all -c "$file.limits" $keep >"$file.run"
    # shellcheck disable=SC2086
    sed -n 's/^requires = \["\(.*\)"\]$/\1/p' pyproject.toml | compile 3.11 - -c "$file.run" $keep >"$file.build"
    {
        echo "# Exact versions of what the $engine engine, the tests and the build need. Written by scripts/pin.sh."
        cat "$file.run" "$file.build" | LC_ALL=C sort -u
    } >"$file.new"
    rm "$file.run" "$file.build" "$file.limits"
    # shellcheck disable=SC2086
    compile 3.12 $all -c "$file.new" >/dev/null
    mv "$file.new" "$file"
    echo "$file: $(grep -c == "$file") packages"
}

pin constraints.txt cpu "${1:-}"
pin constraints-gpu.txt gpu "${1:-}"
