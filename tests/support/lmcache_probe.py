"""LMCache's server, run by its own environment's Python, that tells on request what it holds for its clients.

This program forks servers from what it takes seconds to import. It answers each packet on its control socket, the
arguments of a server and the descriptors of its standard input and output, with the server's process id. A line on a
server's standard input is answered by a line of JSON; its end ends the server.
"""

import gc
import json
import os
import signal
import socket
import sys
import traceback

gc.disable()  # during imports, of which it would take a third
from lmcache.v1.multiprocess import server  # noqa: E402

gc.freeze()
gc.enable()

MAX_PACKET_BYTES = 1 << 16


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose threads"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for servers
    while True:
        packet, descriptors, _, _ = socket.recv_fds(control, MAX_PACKET_BYTES, 2)
        if not packet:
            os._exit(0)
        pid = os.fork()
        if not pid:
            be_server(json.loads(packet), descriptors, control)
        for descriptor in descriptors:
            os.close(descriptor)
        control.send(str(pid).encode())


def be_server(arguments: list[str], descriptors: list[int], control: socket.socket) -> None:
    """Never returns."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        control.close()
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        sys.argv[1:] = arguments
        serve()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def serve() -> None:
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
