#!/usr/bin/env bash
# Unpacks the releases of megatron-core that tests/megatron_releases.py names, side by side and without dependencies.
#
#   PYTHON=.venv/bin/python tests/fetch_megatron.sh .venv/megatron-core
#
# A release that is there already is left alone. The tests import them on a CPU, in processes of their own.
set -euo pipefail
out=$1
for version in 0.14.0 0.15.3 0.16.1 0.18.2 0.19.2; do
  [ -d "$out/$version/megatron/core" ] && continue
  rm -rf "$out/$version.partial"
  "${PYTHON:-python3}" -m pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python \
    --only-binary=:all: --implementation cp --python-version 3.12 --platform manylinux_2_28_x86_64 \
    --platform manylinux_2_24_x86_64 --target "$out/$version.partial" "megatron-core==$version"
  mv "$out/$version.partial" "$out/$version"
done
