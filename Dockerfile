# Two images, `--target router` (no torch) and `--target worker`; `make images` builds both.
# Each step is one of helm/image/build.sh, which the tests run as well, without a container engine.

# By its digest: --build-arg PYTHON_IMAGE=docker.io/library/python@sha256:DIGEST.
ARG PYTHON_IMAGE=docker.io/library/python:3.11.13-slim-bookworm

FROM ${PYTHON_IMAGE} AS python
ENV PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore

FROM python AS dist
COPY . /src
RUN /src/helm/image/build.sh dist /dist

FROM python AS router-root
COPY helm/image /image
RUN /image/build.sh dependencies router /opt/baton
COPY --from=dist /dist /dist
RUN /image/build.sh baton /opt/baton /dist

FROM python AS worker-root
# For a trial without GPUs: --build-arg WORKER=worker-cpu, with TORCH_INDEX=URL of an index that has
# torch's builds for CPUs.
ARG WORKER=worker
ARG TORCH_INDEX=
COPY helm/image /image
RUN /image/build.sh dependencies ${WORKER} /opt/baton
COPY --from=dist /dist /dist
RUN /image/build.sh baton /opt/baton /dist

# What runs: nobody's user, and nothing that it may write but /tmp and /cache. Kubernetes has probes,
# so there is no HEALTHCHECK.
FROM ${PYTHON_IMAGE} AS runtime
RUN apt-get update && apt-get install --yes --no-install-recommends tini && rm -rf /var/lib/apt/lists/*
RUN install -d -o 10001 -g 10001 /cache
ENV PATH=/opt/baton/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin \
    HOME=/tmp USER=baton HF_HOME=/cache/huggingface TRITON_CACHE_DIR=/cache/triton \
    PYTHONDONTWRITEBYTECODE=1 PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
LABEL org.opencontainers.image.title="Baton" \
      org.opencontainers.image.description="Serves large language models with prefill and decode apart" \
      org.opencontainers.image.licenses="Apache-2.0"
WORKDIR /tmp
VOLUME ["/tmp", "/cache"]
EXPOSE 50051 50053 9090
# Process 1 has no default action for signals: without an init, SIGTERM is lost until Python has set
# a handler.
ENTRYPOINT ["/usr/bin/tini", "--"]

FROM runtime AS router
COPY --from=router-root /opt/baton /opt/baton
EXPOSE 8080
USER 10001:10001
CMD ["baton", "router"]

FROM runtime AS worker
# Triton builds its launchers, when a kernel is used for the first time, with a C compiler.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY --from=worker-root /opt/baton /opt/baton
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
EXPOSE 50052
USER 10001:10001
CMD ["baton", "decode-worker"]
