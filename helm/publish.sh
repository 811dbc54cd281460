#!/bin/sh
# Pushes the images and the chart to an OCI registry, the chart signed:
#
#   publish.sh REGISTRY [--plain-http]
#
# The images are those that `make images REGISTRY=REGISTRY/` has built. The chart that is pushed names
# the registry and the digests of the images, so its signature (Helm's provenance) is theirs as well.
# Credentials are those of `docker login` or `podman login`, and `helm registry login`. It reads
#
#   GPG_KEY               the name of the secret key to sign with, an RSA key
#   GPG_PASSPHRASE_FILE   a file with its passphrase; unset: it has none
#   CONTAINER             docker, or podman
#   HELM                  helm
#   RUNBOOK_URL           the address of the page that alerts lead to; unset: none
set -eu

usage() {
  sed -n '2,/^set/{/^#/p;}' "$0" >&2
  exit 2
}

plain=
case $# in
1) ;;
2) [ "$2" = --plain-http ] || usage && plain=yes ;;
*) usage ;;
esac
registry=${1%/}
here=$(cd "$(dirname "$0")" && pwd)
engine=${CONTAINER:-docker}
helm=${HELM:-helm}
: "${GPG_KEY:?the name of the secret key to sign with}"
version=$(sed -n 's/^appVersion: //p' "$here/baton/Chart.yaml")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
umask 077

push_image() { # NAME: prints the digest that the registry has
  name=$registry/baton-$1:$version
  case $engine in
  *podman)
    "$engine" push ${plain:+--tls-verify=false} --digestfile "$work/digest" "$name" >&2
    cat "$work/digest"
    ;;
  *) "$engine" push "$name" | tee /dev/stderr | sed -n 's/.*digest: \(sha256:[0-9a-f]*\).*/\1/p' ;;
  esac
}

cp -R "$here/baton" "$work/baton"
values=$work/baton/values.yaml
set_value() { # BEGINNING VALUE: fills in the empty string after the beginning of a line, a pattern
  grep -q "^$1\"\"" "$values" || { echo "values.yaml has no line like $1\"\"" >&2; exit 1; }
  sed -i "s|^\($1\)\"\"|\1\"$2\"|" "$values"
}
set_value "  registry: " "$registry"
set_value "  runbookUrl: " "${RUNBOOK_URL-}"
for image in router worker; do
  digest=$(push_image "$image")
  case $digest in
  sha256:*) ;;
  *) echo "$engine told no digest of baton-$image" >&2 && exit 1 ;;
  esac
  echo "$registry/baton-$image@$digest"
  set_value "  $image: { repository: .*digest: " "$digest"
done

phrase=${GPG_PASSPHRASE_FILE:-/dev/null}
gpg --batch --pinentry-mode loopback --passphrase-file "$phrase" --export-secret-keys "$GPG_KEY" > "$work/keys"
"$helm" package "$work/baton" --destination "$work" --sign --key "$GPG_KEY" --keyring "$work/keys" \
  ${GPG_PASSPHRASE_FILE:+--passphrase-file "$phrase"}
"$helm" push "$work"/baton-*.tgz "oci://$registry/charts" ${plain:+--plain-http}
