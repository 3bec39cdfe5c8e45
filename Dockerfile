# trtconvert in containers; docs/installation.md says how to use them.
#   build    converts on a CPU: calibrates, plans, exports, builds engines for TensorRT-RTX, evaluates
#   runtime  compiles and runs bundles on an NVIDIA GPU, and serves them; the default
# Both install one wheel: compiled here, or the wheel of `make wheel` with --build-context wheel=out/dist.
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS compile
ARG CUDA_ARCHITECTURES="80;86;90a;120"
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY CMakeLists.txt CHANGELOG.md LICENSE README.md constraints.txt pyproject.toml ./
COPY plugins plugins
COPY recipes recipes
COPY trtconvert trtconvert
RUN python3 -m venv /venv \
    && /venv/bin/python -m pip wheel --no-cache-dir --no-deps --wheel-dir /dist \
        -C "cmake.define.TRTCONVERT_CUDA_ARCHITECTURES=${CUDA_ARCHITECTURES}" .

FROM scratch AS wheel
COPY --from=compile /dist/*.whl /

FROM ${BASE} AS installed
COPY --from=wheel /*.whl /wheel/
COPY constraints.txt /wheel/
RUN python3 -m venv /opt/trtconvert \
    && mkdir /cache /work \
    && chmod 1777 /cache /work
ENV PATH=/opt/trtconvert/bin:${PATH} \
    XDG_CACHE_HOME=/cache \
    PYTHONUNBUFFERED=1
WORKDIR /work

FROM installed AS build
RUN for wheel in /wheel/*.whl; do \
        python -m pip install --no-cache-dir --constraint /wheel/constraints.txt "${wheel}[rtx,evaluate,datasets,diffusers,gguf]"; \
    done
USER 1000:1000
ENTRYPOINT ["trtconvert"]

FROM installed AS runtime
RUN for wheel in /wheel/*.whl; do \
        python -m pip install --no-cache-dir --constraint /wheel/constraints.txt "${wheel}[tensorrt,diffusers,serve]"; \
    done
# The NVIDIA container toolkit adds the driver's libraries for CUDA, and nvidia-smi.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000:1000
ENTRYPOINT ["trtconvert"]
