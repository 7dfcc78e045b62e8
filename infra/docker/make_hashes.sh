#!/bin/sh
# Writes infra/docker/hashes.txt: SHA-256 of every file that the images install with pip, torch and what it brings excepted.
#
#   sh infra/docker/make_hashes.sh
#
# Run it after a change of constraints.txt or of the dependencies in pyproject.toml. torch is missing because there are many
# builds of one version, on an index that the user chooses (TORCH_INDEX_URL). The tool, uv, is installed in build/uv.
set -eu
cd "$(dirname "$0")/../.."
[ -x build/uv/bin/uv ] || { python3 -m venv build/uv && build/uv/bin/pip install -q uv; }
python3 infra/docker/group_requirements.py pyproject.toml project | grep -v '^torch[<>=]' |
  build/uv/bin/uv pip compile -q --no-config --no-header --generate-hashes --python-platform linux --python-version 3.11 \
    --constraints constraints.txt --output-file infra/docker/hashes.txt -
