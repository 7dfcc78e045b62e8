#!/bin/sh
# Draws the bus's password once and writes the two files that `base` makes a Secret of: make_secrets.sh [DIRECTORY].
set -eu
umask 077
directory=${1:-$(dirname "$0")/base/secrets}
mkdir -p "$directory"
[ -s "$directory/credentials" ] && exit 0
password=$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')
printf 'authorization { user: "antiphon", password: "%s" }\n' "$password" >"$directory/authorization.conf"
printf 'antiphon:%s' "$password" >"$directory/credentials"
