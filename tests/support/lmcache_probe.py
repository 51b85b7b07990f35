"""LMCache's server, run by its own environment's Python, that tells on request what it holds for its clients.

Arguments are the server's own. A line on standard input is answered by a line of JSON; its end ends the server.
"""

import gc
import json
import sys

gc.disable()  # during imports, of which it would take a third
from lmcache.v1.multiprocess import server  # noqa: E402

gc.freeze()
gc.enable()


def main() -> None:
    options = server.parse_args()
    made = server.run_cache_server(
        mp_config=server.parse_args_to_mp_server_config(options),
        storage_manager_config=server.parse_args_to_config(options),
        obs_config=server.parse_args_to_observability_config(options),
        return_engine=True,
    )
    assert made is not None
    listener, engine = made
    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin:
        status = engine.report_status()
        memory = status["storage_manager"]["l1_manager"]
        told = {name: memory[f"{name}_count"] for name in ("read_locked", "write_locked", "staging_object")}
        told["objects"] = memory["total_object_count"]
        told["sessions"] = status["active_sessions"]
        told["prefetches"] = status["active_prefetch_jobs"]
        told["instances"] = len(status["registered_non_cuda_instance_ids"])
        print(json.dumps(told), flush=True)
    listener.close()
    engine.close()


if __name__ == "__main__":
    main()
