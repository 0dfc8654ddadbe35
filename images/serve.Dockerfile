# Serves the policy: vLLM. The variant is cpu or cuda.
ARG BASE_IMAGE=python:3.11-slim
ARG WHEELS_IMAGE=scratch

FROM ${WHEELS_IMAGE} AS wheels

FROM ${BASE_IMAGE} AS project
ARG VARIANT=cpu
WORKDIR /src
COPY . .
RUN --mount=type=secret,id=ca --mount=type=secret,id=index --mount=type=cache,target=/cache \
    images/install project $([ "$VARIANT" = cpu ] && echo ./requirements/vllm-cpu-metadata)

FROM ${BASE_IMAGE} AS packages
ARG VARIANT=cpu
WORKDIR /src
COPY images/install images/install
COPY requirements/serve-${VARIANT}.txt requirements/
RUN --mount=type=secret,id=ca --mount=type=secret,id=index --mount=type=cache,target=/cache \
    --mount=type=bind,from=wheels,target=/wheels \
    images/install venv serve-${VARIANT}

FROM ${BASE_IMAGE}
ARG VARIANT=cpu
# vLLM links against libnuma on a CPU; on CUDA, Triton compiles its launchers while it serves.
RUN apt-get update -qq \
    && if [ "$VARIANT" = cuda ]; then set -- gcc libc6-dev $([ ! -x /usr/bin/python3 ] || echo python3-dev); else set -- libnuma1; fi \
    && apt-get install -y -qq --no-install-recommends "$@" \
    && rm -rf /var/lib/apt/lists/*
COPY --from=packages /opt/venv /opt/venv
COPY --from=project /opt/nightschool /opt/nightschool
ENV PATH=/opt/nightschool/bin:/opt/venv/bin:$PATH PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 HOME=/tmp USER=nightschool
USER 1000:1000
