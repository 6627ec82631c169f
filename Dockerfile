# All that training needs; nothing is compiled for CUDA: torch brings its libraries, Triton compiles when a kernel first runs.
# docs/guides/clusters.md has the options of docker run.
# For a bit-identical base give its digest: docker build --build-arg BASE=python:3.12.11-slim-bookworm@sha256:... .
ARG BASE=python:3.12.11-slim-bookworm
FROM ${BASE}
# Triton compiles its launchers, setup.py the index builders; NCCL uses InfiniBand only with the libraries of verbs
RUN apt-get update && apt-get install -y --no-install-recommends g++ libc6-dev libibverbs1 librdmacm1 ibverbs-providers && rm -rf /var/lib/apt/lists/*
WORKDIR /megatron
COPY . .
RUN pip install --no-cache-dir -c constraints.txt torch
RUN pip install --no-cache-dir --no-deps --require-hashes -r requirements.lock
RUN pip install --no-cache-dir --no-deps --no-build-isolation .
ENV PYTHONPATH=/megatron
# docker run --user chooses another; mounted folders must be writable for it
RUN useradd --create-home --uid 1000 megatron
USER megatron
CMD ["bash"]
