#!/bin/sh
# Ends with an error if the port of docker-compose.yml is for other machines (BIND) and requests need no API key.
#
# Keys are in OPENAI_API_KEYS, or in the file that ANTIPHON_API_KEYS_FILE names (infra/docker/secrets.yml).
set -eu
case ${BIND:-127.0.0.1} in
  127.* | ::1 | '[::1]' | localhost) exit 0 ;;
esac
if [ -n "${OPENAI_API_KEYS-}${ANTIPHON_API_KEYS_FILE-}" ]; then exit 0; fi
echo "BIND=$BIND lets other machines use this server, and requests need no API key: set OPENAI_API_KEYS, or add" \
  "infra/docker/secrets.yml with a file of keys, or leave BIND out" >&2
exit 78
