# Trains: torch, TRL, PEFT. The variant is cpu or cuda.
ARG BASE_IMAGE=python:3.11-slim
ARG WHEELS_IMAGE=scratch

FROM ${WHEELS_IMAGE} AS wheels

FROM ${BASE_IMAGE} AS project
WORKDIR /src
COPY . .
RUN --mount=type=secret,id=ca --mount=type=secret,id=index --mount=type=cache,target=/cache \
    images/install project

FROM ${BASE_IMAGE} AS packages
ARG VARIANT=cpu
WORKDIR /src
COPY images/install images/install
COPY requirements/train-${VARIANT}.txt requirements/
RUN --mount=type=secret,id=ca --mount=type=secret,id=index --mount=type=cache,target=/cache \
    --mount=type=bind,from=wheels,target=/wheels \
    images/install venv train-${VARIANT}

FROM ${BASE_IMAGE}
COPY --from=packages /opt/venv /opt/venv
COPY --from=project /opt/nightschool /opt/nightschool
ENV PATH=/opt/nightschool/bin:/opt/venv/bin:$PATH PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 HOME=/tmp USER=nightschool
USER 1000:1000
