# Plays, groups and collates: no Prefect, no torch, no model.
ARG BASE_IMAGE=python:3.11-slim

FROM ${BASE_IMAGE} AS project
WORKDIR /src
COPY . .
RUN --mount=type=secret,id=ca --mount=type=secret,id=index --mount=type=cache,target=/cache \
    images/install project

FROM ${BASE_IMAGE} AS packages
WORKDIR /src
COPY images/install images/install
COPY requirements/rollout.txt requirements/
RUN --mount=type=secret,id=ca --mount=type=secret,id=index --mount=type=cache,target=/cache \
    images/install venv rollout

FROM ${BASE_IMAGE}
COPY --from=packages /opt/venv /opt/venv
COPY --from=project /opt/nightschool /opt/nightschool
ENV PATH=/opt/nightschool/bin:/opt/venv/bin:$PATH PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 HOME=/tmp USER=nightschool
USER 1000:1000
