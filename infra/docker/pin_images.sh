#!/bin/sh
# Adds to every image that is taken from a registry the digest that its tag has now: sh infra/docker/pin_images.sh
#
# A tag can be given to another image later, a digest cannot. Run it again after a change of a tag; it needs Docker and the
# registries, and changes the files named below.
set -eu
cd "$(dirname "$0")/../.."
files="docker-compose.yml infra/docker/*.yml infra/docker/*.Dockerfile infra/docker/build_image.sh infra/kubernetes/base/nats.yaml"
before='(image: |FROM |BASE_IMAGE=|base_image=)'
# shellcheck disable=SC2086  # a list of files
for image in $(sed -nE "s#^.*$before([a-z./-]+:v?[0-9][A-Za-z0-9._-]*).*#\2#p" $files | sort -u); do
  digest=$(docker buildx imagetools inspect "$image" --format '{{.Manifest.Digest}}')
  case $digest in sha256:*) ;; *) echo "pin_images.sh: no digest of $image: $digest" >&2; exit 1 ;; esac
  sed -i -E "s#$before$image(@sha256:[0-9a-f]+)?#\1$image@$digest#" $files
  echo "$image@$digest"
done
