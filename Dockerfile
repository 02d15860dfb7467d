# Both images of keepstep, of one file:
#     docker build --target sidecar -t keepstep-sidecar .
#     docker build --target operator -t keepstep-operator .
# What is built here is a virtual environment; the last stages copy it and nothing else. There is no
# compiler, no pip and no torch in them, and they run as a number, not as root.
#
# A release (.github/workflows/release.yaml) sets PYTHON_IMAGE to a digest; LOCKED=1, so that what
# requirements.lock lists is installed by its hashes, and nothing else (`make lock` writes it); SOURCE
# and REVISION.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ARG LOCKED=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore \
    PIP_BREAK_SYSTEM_PACKAGES=1
RUN python3 -m venv --without-pip /opt/keepstep
WORKDIR /build
COPY scripts/install_into_image.sh install.sh
COPY lib lib
RUN if [ -n "$LOCKED" ]; then python3 -m pip install --require-hashes -r lib/requirements.lock; fi \
 && sh install.sh lib

FROM build AS build-sidecar
COPY sidecar sidecar
RUN sh install.sh sidecar \
 && python3 -m compileall -q --invalidation-mode unchecked-hash /opt/keepstep/lib

FROM build AS build-operator
COPY operator operator
RUN sh install.sh operator \
 && python3 -m compileall -q --invalidation-mode unchecked-hash /opt/keepstep/lib

FROM ${PYTHON_IMAGE} AS base
ARG VERSION=0.1.0
ARG PYTHON_IMAGE
ARG SOURCE=""
ARG REVISION=""
LABEL org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${PYTHON_IMAGE}" \
      org.opencontainers.image.vendor="keepstep"
RUN rm -rf /usr/local/lib/python3*/site-packages/pip* /usr/local/bin/pip* \
           /usr/lib/python3/dist-packages/pip* /usr/bin/pip*
# python's images have no bytecode of the standard library, so each start would compile it
RUN python3 -m compileall -q --invalidation-mode unchecked-hash \
      -x '/(test|tests|idlelib|lib2to3|ensurepip|turtledemo|tkinter|site-packages|dist-packages)/' \
      "$(python3 -c 'import os; print(os.path.dirname(os.__file__))')"
ENV PATH=/opt/keepstep/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
WORKDIR /
USER 65532:65532

FROM base AS operator
LABEL org.opencontainers.image.title="keepstep-operator" \
      org.opencontainers.image.description="Injects keepstep's sidecar and keeps track of runs"
COPY --from=build-operator /opt/keepstep /opt/keepstep
ENTRYPOINT ["keepstep-operator"]

FROM base AS sidecar
LABEL org.opencontainers.image.title="keepstep-sidecar" \
      org.opencontainers.image.description="Keeps a training pod's steps in memory and on drives"
COPY --from=build-sidecar /opt/keepstep /opt/keepstep
ENTRYPOINT ["keepstep-sidecar"]
