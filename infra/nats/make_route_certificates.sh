#!/bin/sh
# Makes the certificates with which the servers of a NATS cluster know each other (cluster.conf):
#
#   make_route_certificates.sh DIRECTORY NAME=ADDRESS ...      such as n1=10.0.0.1 n2=10.0.0.2 n3=node-3.example.org
#
# It writes ca.pem, and NAME.pem and NAME.key for each server. A host needs ca.pem and its own two files. ca.key signs
# further servers later: keep it off the hosts. Needs openssl. Certificates are valid for DAYS days (default 825).
set -eu
umask 077
[ $# -ge 2 ] || { sed -n '2,4s/^# \{0,1\}//p' "$0" >&2; exit 78; }
directory=$1; shift
days=${DAYS-825}
mkdir -p "$directory"
if ! [ -s "$directory/ca.pem" ]; then
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days "$days" -subj "/CN=antiphon bus" \
    -keyout "$directory/ca.key" -out "$directory/ca.pem" 2>/dev/null
fi
for server in "$@"; do
  name=${server%%=*} address=${server#*=}
  case "$address" in
    *[!0-9.]*) case "$address" in *:*) kind=IP ;; *) kind=DNS ;; esac ;;
    *) kind=IP ;;
  esac
  openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj "/CN=$name" \
    -keyout "$directory/$name.key" -out "$directory/$name.csr" 2>/dev/null
  printf 'subjectAltName=%s:%s\nextendedKeyUsage=serverAuth,clientAuth\n' "$kind" "$address" >"$directory/$name.ext"
  openssl x509 -req -in "$directory/$name.csr" -CA "$directory/ca.pem" -CAkey "$directory/ca.key" -CAcreateserial \
    -days "$days" -extfile "$directory/$name.ext" -out "$directory/$name.pem" 2>/dev/null
  rm "$directory/$name.csr" "$directory/$name.ext"
done
