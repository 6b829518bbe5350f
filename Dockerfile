# Image for hosts with CUDA GPUs, on top of an SGLang image that brings CUDA, torch and SGLang.
#
#   docker build -t slime .
#   docker run --gpus all --ipc=host --ulimit memlock=-1 -it slime
#
# Not proven: no machine of this project's CI has built this image yet. Machines without a GPU need no image; there
# `bash scripts/install.sh` does everything.
ARG SGLANG_IMAGE=lmsysorg/sglang
ARG SGLANG_TAG=v0.5.21
FROM ${SGLANG_IMAGE}:${SGLANG_TAG}

WORKDIR /opt/slime

# The requirements first: a change in the code does not install them again.
COPY requirements/gpu.txt requirements/gpu.txt
# torch and sglang stay as the base image has them; its CUDA builds need not carry the version of the package index.
RUN grep -vE '^(torch|sglang)==' requirements/gpu.txt > /tmp/requirements.txt \
    && python3 -m pip install --no-cache-dir -r /tmp/requirements.txt \
    && rm /tmp/requirements.txt

COPY pyproject.toml README.md LICENSE ./
COPY slime slime
COPY slime_plugins slime_plugins
COPY tools tools
COPY scripts scripts
COPY examples examples
COPY train.py train_async.py ./
RUN python3 -m pip install --no-cache-dir --no-deps -e .

# One connection, so that kernels are launched in program order and communication overlaps as Megatron expects.
ENV CUDA_DEVICE_MAX_CONNECTIONS=1
CMD ["bash"]
