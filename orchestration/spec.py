"""What a cluster consists of: pure data, and its expansion to the configs of its processes."""

from pathlib import Path

import msgspec

from splitserve.config import Confidential, EngineConfig, ProtocolConfig, RouterConfig, WorkerConfig
from splitserve.errors import CheckpointError, ConfigError
from splitserve.orchestration.cores import split_cores
from splitserve.request import Role
from splitserve.security import check_exposure


class ClusterSpec(Confidential, frozen=True, kw_only=True):
    """One model on one machine: the engine's settings, how many workers of each role, where the router listens.

    ``worker_host`` is the address of the side channels: workers and membership bind it; off loopback it takes a
    ``secret``. ``api_key`` is what clients must show.

    ``engine.threads`` 0 splits the cores between the workers; otherwise each worker gets that many. Raises
    :class:`ConfigError` for numbers of workers that can't serve.
    """

    engine: EngineConfig
    num_prefill: int = 0
    num_decode: int = 0
    num_mixed: int = 0
    host: str = "127.0.0.1"
    port: int = 8000
    policy: str = "least-loaded"
    worker_host: str = "127.0.0.1"
    secret: str = ""
    api_key: str = ""
    protocol: ProtocolConfig = ProtocolConfig()

    def __post_init__(self) -> None:
        for name in ("num_prefill", "num_decode", "num_mixed"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must not be negative")
        if self.num_prefill and not self.num_decode:
            raise ConfigError(
                f"{self.num_prefill} prefill and no decode worker: nobody would generate; add --decode N, "
                "or use --mixed N for workers that do both"
            )
        if self.num_decode and not self.num_prefill:
            raise ConfigError(
                f"{self.num_decode} decode and no prefill worker: nobody would compute prompts; add "
                "--prefill N, or use --mixed N for workers that do both"
            )
        if not self.num_workers:
            raise ConfigError("no workers: say --prefill P --decode D (disaggregated) or --mixed N (not disaggregated)")
        if not 0 <= self.port < 2**16:
            raise ConfigError(f"port is {self.port}; it must be 0 (take a free one) to 65535")
        check_exposure(self.worker_host, self.secret)

    @property
    def num_workers(self) -> int:
        return self.num_prefill + self.num_decode + self.num_mixed

    @property
    def served_model_name(self) -> str:
        """The id under which clients ask for the model: as given, else the directory's name."""
        return self.engine.served_model_name or Path(self.engine.model).resolve().name

    def describe(self) -> str:
        """Like ``2 prefill + 1 decode``."""
        numbers = {"prefill": self.num_prefill, "decode": self.num_decode, "mixed": self.num_mixed}
        return " + ".join(f"{number} {role}" for role, number in numbers.items() if number)

    def router_config(self) -> RouterConfig:
        return RouterConfig(
            model=self.engine.model,
            served_model_name=self.served_model_name,
            host=self.host,
            port=self.port,
            policy=self.policy,
            membership_host=self.worker_host,
            secret=self.secret,
            api_key=self.api_key,
            protocol=self.protocol,
        )

    def worker_configs(self, membership: str, num_cores: int) -> list[WorkerConfig]:
        """Configs of the workers ``prefill-0``, ``decode-0``, ...; ``num_cores`` are split unless threads are set."""
        numbers = {Role.PREFILL: self.num_prefill, Role.DECODE: self.num_decode, Role.MIXED: self.num_mixed}
        places = [(role, index) for role, number in numbers.items() for index in range(number)]
        threads = [self.engine.threads] * len(places) if self.engine.threads else split_cores(num_cores, len(places))
        return [
            WorkerConfig(
                engine_id=f"{role.value}-{index}",
                role=role,
                engine=msgspec.structs.replace(
                    self.engine, threads=num_threads, served_model_name=self.served_model_name
                ),
                membership=membership,
                host=self.worker_host,
                secret=self.secret,
                protocol=self.protocol,
            )
            for (role, index), num_threads in zip(places, threads, strict=True)
        ]


def check_model_directory(model: str) -> None:
    """Raise :class:`CheckpointError` unless ``model`` is a directory with a Hugging Face ``config.json``."""
    folder = Path(model)
    if not folder.exists():
        raise CheckpointError(
            f"no such directory: {model}. Give the path of a Hugging Face checkpoint on disk; "
            "`splitserve demo-model DIR` writes a small one"
        )
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{model} is not a Hugging Face checkpoint: it has no config.json "
            "(it needs that, *.safetensors and tokenizer.json)"
        )
