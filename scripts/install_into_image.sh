#!/bin/sh
# Installs one of our packages (lib, operator, sidecar) into the environment of an image, with what it
# needs: from its requirements.lock alone where LOCKED is set, else the newest within its ranges. Of
# the library the pure parts are used, torch is not, so its dependencies are left out.
set -eu
part=$1
into="python3 -m pip --python /opt/keepstep/bin/python install"
if [ -n "${LOCKED:-}" ]; then
  [ "$part" = lib ] || $into --no-deps --require-hashes --only-binary :all: -r "$part/requirements.lock"
elif [ "$part" != lib ]; then
  python3 -c 'import sys, tomllib
listed = tomllib.load(open(sys.argv[1], "rb"))["project"]["dependencies"]
print("\n".join(one for one in listed if not one.startswith("keepstep")))' "$part/pyproject.toml" > needs.txt
  $into -r needs.txt
fi
# what builds it is locked, too, and then already there
python3 -m pip wheel -q --no-deps ${LOCKED:+--no-build-isolation} -w "wheels/$part" "./$part"
$into --no-deps --no-index "wheels/$part"/*.whl
