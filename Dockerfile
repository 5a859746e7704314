# The environment that run_training.sh sets up on a GPU node, on NVIDIA's PyTorch image. This file has not been built or
# run yet.
#
#   docker build -t fp8-pretraining .
#   docker run --gpus all --ipc=host --ulimit memlock=-1 -v "$PWD:/work" -w /work fp8-pretraining \
#       python train/launch.py --nproc 8 train/train.py train_args/train_config_fp8.json
#
# For Slurm with Pyxis: enroot import dockerd://fp8-pretraining, then set CONTAINER_IMAGE for run_training.sh.
# Use any tag with CUDA 13 and a torch that Transformer Engine 2.20.2 compiles with. Measurements used torch 2.11.0.
ARG PYTORCH_IMAGE=nvcr.io/nvidia/pytorch:25.10-py3
FROM ${PYTORCH_IMAGE}

# The image constrains packages to its own versions; this project is tested with those in requirements*.txt.
ENV PIP_CONSTRAINT="" PIP_NO_CACHE_DIR=1 TOKENIZERS_PARALLELISM=false
WORKDIR pretraining
COPY requirements.txt requirements-prep.txt requirements-gpu.txt constraints-gpu.txt ./
RUN pip uninstall -y transformer-engine flash-attn \
 && pip install -r requirements.txt -r requirements-prep.txt \
 && pip install --no-build-isolation -r requirements-gpu.txt
COPY . .
CMD ["python", "train/train.py", "--help"]
