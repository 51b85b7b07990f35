"""Settings of a cluster as keyword arguments. Made by `python scripts/reference_pages.py`, not by hand."""

import os
from collections.abc import Sequence
from typing import Literal, TypedDict


class Settings(TypedDict, total=False):
    """Settings of a cluster: the options of `splitserve serve` without their dashes."""

    # --tensor-parallel-size of the prefill workers; 0: as for all
    prefill_tp: int
    # --tensor-parallel-size of the decode workers; 0: as for all
    decode_tp: int
    # address that workers and membership bind; empty: 127.0.0.1 on one machine, the node's own address on Ray
    worker_host: str
    # network interface whose address they bind instead, like eth0
    interface: str
    # bind the interface's IPv6 address, not its IPv4 one
    ipv6: bool
    # file with the secret that protects messages between processes, needed off loopback; empty: $SPLITSERVE_SECRET,
    # else none
    secret_file: str | os.PathLike[str]
    # let workers have the same GPU; set their KV memory then
    share_gpus: bool
    # threads of each worker; 0 splits a machine's cores between its workers
    threads: int
    # branch, tag or commit of a model of the Hub; empty: its main branch
    revision: str
    # address that the endpoint binds
    host: str
    # port that the endpoint binds; 0 takes a free one
    port: int
    # router processes on the port. One uses one core; more help where that is busy. Not on Ray
    router_workers: int
    # how requests are placed; cost: the route with the smallest predicted excess over the objectives; least-loaded: the
    # workers with the largest free share; power-of-two: the less loaded of two workers drawn at random; prefix: the
    # workers with the longest cached part of the prompt, if that is half of it and worth their queue; round-robin:
    # workers in turn; session: the same workers for all requests of an X-Session-Id
    policy: Literal["cost", "least-loaded", "power-of-two", "prefix", "round-robin", "session"]
    # largest body of a request (413 beyond); parsing one MiB can hold all streams for 10 ms
    max_body_mib: int
    # form of the model's reasoning and tool calls: auto, none, the name of a known form, or a file of JSON
    response_template: str
    # source of sampling defaults, where a request sets none: auto for the model's generation_config.json, none for
    # temperature 1 and no truncation, or a directory with that file
    generation_config: str
    # file with a chat template (Jinja) that replaces the model's; empty: the model's
    chat_template: str | os.PathLike[str]
    # origins of web pages that may call the endpoint (CORS), like https://app.example.com; or *
    allowed_origins: str | Sequence[str]
    # YAML file with the tenants' keys, shares and limits, read again on SIGHUP; empty: none
    tenants: str | os.PathLike[str]
    # write a line to the log when a request ends, in each process; off: only if it failed
    request_log: bool
    # openTelemetry collector that takes traces by OTLP over HTTP, like http://127.0.0.1:4318; empty: none
    otlp_endpoint: str
    # share of requests that are traced, where the client doesn't decide
    trace_ratio: float
    # file with the key that /v1 and /admin require as 'Authorization: Bearer KEY'; empty: $SPLITSERVE_API_KEY, else
    # none
    api_key_file: str | os.PathLike[str]
    # file with the key that /admin requires instead of the API key; empty: $SPLITSERVE_ADMIN_KEY, else the API key
    admin_key_file: str | os.PathLike[str]
    # ids that clients use for the model, the first of them in answers to requests without one; none: the model id, or
    # the directory's name
    served_model_name: str | Sequence[str]
    # type of weights and KV; auto: the checkpoint's. All pools must agree
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    # kind of device; auto: CUDA if there is a GPU
    device: Literal["auto", "cpu", "cuda"]
    # source of weights; dummy: random ones, for measuring
    load_format: Literal["auto", "dummy"]
    # code that computes the model; native: Splitserve's, for families that it has; transformers: that library's, over
    # Splitserve's attention and KV memory, with one rank a worker; auto: native if there is a family
    model_backend: Literal["auto", "native", "transformers"]
    # seed of dummy weights
    seed: int
    # context length in tokens; 0: the model's own
    max_model_len: int
    # processes (ranks) that share a worker's model, on one GPU each if there are GPUs
    tensor_parallel_size: int
    # split of a mixture of experts over a worker's ranks; on: each has some of the experts; off: each has a part of
    # every expert; auto: the latter, unless the parts would be too small
    expert_parallel: Literal["auto", "on", "off"]
    # kernels of attention; auto: the best that can run
    attention_backend: Literal["auto", "hybrid", "flashinfer", "triton", "reference"]
    # run without CUDA graphs
    enforce_eager: bool
    # capture CUDA graphs of steps with a small prefill as well, beside decode or alone
    capture_mixed_steps: bool
    # launch steps of a GPU that decodes just in time, so that newly arrived requests join them
    late_launch: bool
    # keep workers on GPUs to half of the cores, and those awake while there are requests: sooner tokens, for machines
    # that do nothing else
    keep_cores_awake: bool
    # tokens of one step; 0: 8192 on a GPU, 512 on CPU
    max_batched_tokens: int
    # prompt tokens of a step that also decodes, or that a hand-over in progress would wait for; smaller: shorter ITL,
    # later first tokens; 0: 320 on a GPU, as many as fit the step on CPU
    max_prefill_tokens_beside_decode: int
    # the same at most where an ITL objective sizes prompts; 0: that if given, else 576 on a GPU
    max_prefill_tokens_within_objective: int
    # sequences that run at once in a worker; 0: 256 on a GPU, 64 on CPU
    max_num_seqs: int
    # let a prefill worker without other prompts draw the second token, too, while KV is read
    second_token_at_prefill: bool
    # directory on the worker's machine for profiles that POST /admin/profile asks for; empty: none
    profile_dir: str | os.PathLike[str]
    # tokens per KV block; 0: 64 on a GPU, 16 on CPU
    block_size: int
    # type of KV memory; auto: as dtype; fp8: half the memory and hand-over, less accuracy
    kv_cache_dtype: Literal["auto", "fp8"]
    # KV memory of each worker, like 512MiB, 2GB or 1.5g; 0: decided at start
    kv_memory: int | str
    # share of a GPU's memory that a worker takes in all, unless its KV memory is given
    gpu_memory_utilization: float
    # reuse the KV of earlier prompts with the same beginning
    enable_prefix_caching: bool
    # digest blocks on both sides of each hand-over; one that differs is logged, counted, not used
    verify_kv: bool
    # threads that read KV from a peer at once, where reads are posted to a transport; 0: as many as fill the link
    read_threads: int
    # let a GPU copy from a peer's memory through a mapping of it, where that is faster
    map_peer_memory: bool
    # have workers publish what KV they hold (docs/guides/kv-events.md)
    kv_events: bool
    # host memory of each worker for more KV, like 16GiB, pinned on a GPU worker; 0: none
    host_kv_memory: int | str
    # directory for KV beyond host memory, which a worker finds again after a restart; empty: none
    disk_kv_dir: str | os.PathLike[str]
    # largest size of each worker's KV in disk_kv_dir, like 64GiB
    disk_kv_size: int | str
    # NIXL backend that moves KV to disk_kv_dir: POSIX, or GPUDirect Storage where it is installed
    disk_kv_backend: Literal["posix", "gds"]
    # endpoint of an LMCache server that runs on each worker's machine already, like tcp://127.0.0.1:5555 (`splitserve
    # lmcache`)
    lmcache: str
    # blocks that are worth keeping beyond the device
    kv_keep: Literal["all", "second-use", "prompt"]
    # how long a request waits for KV from a tier before it computes it
    kv_load_seconds: float
