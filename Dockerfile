# Threefold on CPUs, for any machine with Docker:
#
#   docker build -t threefold .
#   docker run --rm --shm-size 2g --user "$(id -u):$(id -g)" -v "$PWD:/work" threefold train my.yaml --run-dir runs/first
#
# It runs as a user without privileges, and has the compiler that `train.compile` needs. With `--user`, what a run writes is yours.
#
# The torch that pip gets by default also runs on CPUs but brings CUDA's libraries, some gigabytes; with the address of PyTorch's index
# of CPU wheels (its installation page has it) the image is a fraction of that: --build-arg TORCH_INDEX=ADDRESS.
#
# With CUDA: the default torch and `docker run --gpus all …`; or an image that has torch 2.13 already, which pip leaves in place:
# --build-arg BASE=IMAGE. The private parts of a torch that is not the tested release are checked when it is first used.
ARG BASE=python:3.11-slim
FROM ${BASE}
ARG TORCH_INDEX=
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml README.md LICENSE /src/
COPY threefold /src/threefold
COPY parity /src/parity
RUN pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "/src[tensorboard]" /src/parity && rm -rf /src
# Caches are in the home folder, which the user of `--user` may write to as well.
RUN useradd --create-home threefold && chmod 1777 /home/threefold && install --directory --owner threefold /work
ENV HOME=/home/threefold
USER threefold
WORKDIR /work
ENTRYPOINT ["threefold"]
CMD ["--help"]
