#!/bin/sh
# Builds the image of the whole server: sh infra/docker/build_image.sh --base-image=IMAGE --image-name=NAME
#
# IMAGE (default: python:3.11-slim-bookworm) is what the image is based on, NAME (default: antiphon) what it is called.
# TORCH_INDEX_URL in the environment names the package index for torch. docs/start/container.md says how to run the image.
set -eu

usage="usage: build_image.sh [--base-image=IMAGE] [--image-name=NAME]"
base_image=python:3.11-slim-bookworm
image_name=antiphon

fail() {
    echo "build_image.sh: $1" >&2
    exit "$2"
}

while [ $# -gt 0 ]; do
    option=${1%%=*}
    case $option in
        --base-image | --image-name) ;;
        -h | --help)
            echo "$usage"
            exit 0
            ;;
        *) fail "unknown option $1
$usage" 2 ;;
    esac
    if [ "$option" != "$1" ]; then
        value=${1#*=}
    elif [ $# -gt 1 ]; then
        value=$2
        shift
    else
        value=
    fi
    shift
    [ -n "$value" ] || fail "$option needs a value" 2
    case $option in
        --base-image) base_image=$value ;;
        --image-name) image_name=$value ;;
    esac
done

command -v docker >/dev/null || fail "there is no command docker: install Docker" 1
root=$(cd "$(dirname "$0")/../.." && pwd)
docker build --file "$root/infra/docker/server.Dockerfile" --target run --tag "$image_name" \
    --build-arg BASE_IMAGE="$base_image" --build-arg TORCH_INDEX_URL="${TORCH_INDEX_URL:-}" "$root"
echo "built $image_name; start it with: docker run -p 8501:8501 -v MODEL_DIR:/data/model:ro $image_name"
