# The first command in a container, on a CPU; logs/ keeps what it leaves:
#     docker build -t train_gpt . && docker run --rm -v "$PWD/logs:/repo/logs" train_gpt
# The tests:  docker run --rm train_gpt test
FROM python:3.12-slim
RUN apt-get update && apt-get install -y --no-install-recommends g++ git && rm -rf /var/lib/apt/lists/*
WORKDIR /repo
COPY requirements*.txt run.sh ./
RUN ./run.sh test --version  # installs into .venv, a layer of its own, before the files that change often
COPY . .
ENTRYPOINT ["./run.sh"]
