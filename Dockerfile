# All that training needs; nothing is compiled for CUDA: torch brings its libraries, Triton compiles when a kernel first runs.
# docs/guides/clusters.md has the options of docker run.
FROM python:3.12-slim
# Triton compiles its launchers, setup.py the index builders
RUN apt-get update && apt-get install -y --no-install-recommends g++ libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /megatron
COPY . .
RUN pip install --no-cache-dir -c constraints.txt '.[mlm]'
ENV PYTHONPATH=/megatron
CMD ["bash"]
