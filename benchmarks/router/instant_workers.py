"""Several workers without a model in one process, each on a thread of its own:
``python -m splitserve.benchmarks.router.instant_workers --membership tcp://127.0.0.1:PORT --prefill 1 --decode 1``.
"""

import gc
import threading
import time
from collections.abc import Sequence

import msgspec

from splitserve.benchmarks.router.instant_worker import InstantWorker, WorkerOptions
from splitserve.benchmarks.router.worker_script import DEFAULT_LAYOUT, default_script
from splitserve.orchestration.cli.command_parser import CommandParser
from splitserve.protocol.counters import WorkerLoad
from splitserve.protocol.messages.requests import PeerRef
from splitserve.protocol.placement.step_model import StepModel
from splitserve.protocol.request import Role

MAX_NUM_SEQS = 1024
STEP_MODEL = StepModel(4e-3, 1.5e-5, 3.1e-8, 2.4e-5, 1.3e-9, 1000)
"""An 8B model on an H200."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the workers until the process is killed. Prints a line of JSON: the identities and addresses of all of
    them."""
    parser = CommandParser(description=main.__doc__)
    parser.add_argument("--membership", required=True, help="the router's membership endpoint")
    for role in Role:
        parser.add_argument(f"--{role}", type=int, default=0, help=f"number of {role} workers")
    parser.add_argument("--token-seconds", type=float, default=0.0, help="seconds between tokens; 0 sends all at once")
    parser.add_argument("--first-token-seconds", type=float, default=0.0, help="seconds before the first token")
    parser.add_argument("--max-num-seqs", type=int, default=MAX_NUM_SEQS)
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--num-blocks", type=int, default=1 << 15)
    parser.add_argument("--step-models", action="store_true", help="report a model of steps, as workers do in time")
    options = parser.parse_args(argv)
    num_decode = int(options.decode)
    workers = []
    for role in Role:
        for number in range(getattr(options, role)):
            script = default_script(
                tokens_per_message=1,
                token_seconds=options.token_seconds,
                first_token_seconds=options.first_token_seconds,
            )
            settings = WorkerOptions(
                engine_id=f"{role}-{number}",
                role=role,
                layout=msgspec.structs.replace(DEFAULT_LAYOUT, block_size=64),  # as on GPUs
                vocab_size=options.vocab_size,
                max_model_len=options.max_model_len,
                max_num_seqs=options.max_num_seqs,
                num_blocks=options.num_blocks,
                heartbeat_seconds=1.0,
                step_model=STEP_MODEL if options.step_models else StepModel(),
            )
            worker = InstantWorker(options.membership, script, settings)
            worker.load = WorkerLoad(peers_ready=int(options.prefill) if role is Role.DECODE and num_decode else 0)
            worker.keep_record = False
            workers.append(worker)
    gc.collect()
    gc.disable()  # its pauses would be taken for the router's, and these workers make no cycles
    for worker in workers:
        threading.Thread(target=worker.run, daemon=True).start()
    refs = [PeerRef(worker.party, worker.endpoint) for worker in workers]
    print(msgspec.json.encode(refs).decode(), flush=True)
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    main()
