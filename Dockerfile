# An image that serves the pair that ships, or any other: docs/how-to/install.md.
#   docker build -t manta .
#   PIP_ARGS  added to `pip install`; PyTorch's index of CPU wheels makes a much smaller image
#   EXTRAS    of the wheel: [gpu] by default
#   COMPILE   arguments of `manta compile`, whose kernels are then in the image
FROM python:3.11-slim AS build
WORKDIR /source
RUN pip install --no-cache-dir "build>=1.2" "setuptools>=77"
COPY pyproject.toml setup.py README.md LICENSE __init__.py data.py version.py ./
COPY actors actors
COPY cluster cluster
COPY drafter drafter
COPY jobs jobs
COPY models models
RUN python -m build --wheel --no-isolation --outdir /wheels

FROM python:3.11-slim
ARG PIP_ARGS=""
ARG EXTRAS="[gpu]"
ARG COMPILE=""
# Triton compiles its launchers with gcc; pretending a GPU may need g++.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev ${COMPILE:+g++} && rm -rf /var/lib/apt/lists/*
COPY --from=build /wheels/ /wheels/
RUN wheel="$(echo /wheels/manta_dflash-*.whl)" && pip install --no-cache-dir $PIP_ARGS "$wheel$EXTRAS"
RUN useradd --create-home manta
USER manta
WORKDIR /home/manta
# A volume that is mounted here gets its owner.
RUN mkdir .cache
RUN if [ -n "$COMPILE" ]; then manta compile $COMPILE; fi
EXPOSE 8000
CMD ["manta", "serve", "models/target", "--spec-model", "models/drafter", "--host", "0.0.0.0", "--port", "8000"]
