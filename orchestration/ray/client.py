"""A cluster on Ray for the commands: started, asked and ended from any machine that reaches Ray.

The code travels as the driver's ``runtime_env``: nodes need the environment (PyTorch, NIXL, ...), but no installed
Splitserve.
"""

import contextlib
import importlib.util
import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from splitserve.common.errors import ConfigError
from splitserve.orchestration.cli.client import OperationError, Say, status_of
from splitserve.orchestration.cli.requirements import pip_arguments
from splitserve.orchestration.cluster.host import ChildProgress
from splitserve.orchestration.cluster.launch_errors import LaunchError
from splitserve.orchestration.control.requests import AnyReply, AnyRequest, Stop, decode_reply, encode
from splitserve.orchestration.hosts.local import ENTRIES, Entries
from splitserve.orchestration.ray.names import NAMESPACE, SOME_MEMORY_BYTES, controller_name
from splitserve.orchestration.spec.cluster_spec import ClusterSpec
from splitserve.orchestration.spec.conversion import convert_spec

CONNECT_SECONDS = 5.0
COMEBACK_SECONDS = 30.0
REPLACEMENT_SECONDS = 5.0  # an upgrade is between its two controllers for a second
REPLY_SECONDS = 60.0
STOP_SECONDS = 120.0  # freeing large host tiers is slow
CONTROLLER_THREADS = 32
_EXCLUDED = ["**/__pycache__/**", "benchmarks/results/**"]


def connect(address: str, *, with_code: bool = False) -> None:
    """Join the Ray cluster as a driver; with ``with_code``, actors that are created run the code of this process.

    Raises :class:`ConfigError` if Ray isn't installed or doesn't answer.
    """
    check_ray_is_installed()
    import ray

    if address.startswith("ray://"):
        raise ConfigError(f"{address} is Ray Client's; give the address of the cluster itself, like HOST:6379, or auto")
    if ray.is_initialized():
        return
    _check_that_somebody_listens(address)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if _lacks_its_token(address):  # first: ray.init tries again for 20 s before it fails
        raise ConfigError(
            f"the Ray cluster at {address} requires a token, and none or another one is set here: set "
            "RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to a file with the cluster's token"
        )
    # Ray's messages about its nodes would come between the lines (or the JSON) of a command.
    ray._private.worker.print_to_stdstream = _ignore
    try:
        ray.init(
            address=address,
            namespace=NAMESPACE,
            runtime_env={"py_modules": [_package()], "excludes": _EXCLUDED} if with_code else None,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
        )
    except (ConnectionError, RuntimeError, ValueError, OSError, ray.exceptions.AuthenticationError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"no Ray cluster answers at {address}: {reason}") from error


def check_ray_is_installed() -> None:
    """Raise :class:`ConfigError` with instructions if Ray isn't installed.

    Ray isn't imported: it reads its authentication settings at its import, and those may not be known yet.
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            f"Ray is not installed: pip install {pip_arguments('ray')}, or pip install '.[ray]' in a clone "
            "of Splitserve; without --ray a cluster runs on this machine alone"
        )


def _lacks_its_token(address: str) -> bool:
    """Return whether the head rejects this process's token, or its lack of one: Ray's own error only says "failed"."""
    import ray
    from ray.exceptions import AuthenticationError, RayError

    if not address.rpartition(":")[2].isdigit():
        return False
    try:
        ray._raylet.GcsClient(address=address)
    except AuthenticationError:
        return True
    except (RayError, RuntimeError, ValueError, OSError):
        return False
    return False


def disconnect() -> None:
    """Leave Ray. A process that ends later than its Ray cluster waits for it for seconds."""
    import ray

    ray.shutdown()


def _check_that_somebody_listens(address: str) -> None:
    """Raise :class:`ConfigError` if no process listens at the address: Ray itself would retry for minutes. Skips
    ``auto`` and the like, which Ray resolves."""
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConfigError(f"no Ray cluster answers at {address}: {error.strerror or error}") from error
            time.sleep(0.2)


def _ignore(*_arguments: Any, **_options: Any) -> None:
    """Ignore Ray's messages: our own report the effects of a dead node on a cluster."""


def _package() -> str:
    """Return the folder of the package, which contains symlinks to the other folders."""
    import splitserve

    return str(Path(splitserve.__file__).parent)


def start_on_ray(
    spec: ClusterSpec,
    address: str,
    log_level: str,
    *,
    restart: bool,
    show: Callable[[ChildProgress], None],
    entries: Entries = ENTRIES,
) -> str:
    """Start a cluster that outlives this process; returns its URL once it answers.

    If interrupted, it ends the cluster. Raises :class:`LaunchError` with the cluster's own message if the start fails.
    """
    connect(address, with_code=True)
    client = RayClient(spec.name, address)
    if client.is_headless():
        raise ConfigError(client.headless())
    if client.leftovers():
        raise ConfigError(
            f"a cluster called {spec.name} is on Ray already, or its remains are: choose another --name, or end it "
            f"first (splitserve down --ray {address} --name {spec.name})"
        )
    create_controller(spec, log_level, restart=restart, entries=entries)
    try:
        return client.follow_start(show)
    except BaseException:
        client.down(lambda _line: None)
        raise


def create_controller(spec: ClusterSpec, log_level: str, *, restart: bool, entries: Entries = ENTRIES) -> None:
    """Create the cluster's controller on this driver's node, if it has one, with this driver's code."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from splitserve.orchestration.ray.controller import Controller, ControllerOrder
    from splitserve.orchestration.ray.stored_state import remember_order

    order = msgspec.json.encode(
        ControllerOrder(
            spec=msgspec.to_builtins(spec),
            log_level=log_level,
            restart=restart,
            entries=astuple(entries),
        )
    )
    controller = ray.remote(Controller).options(
        name=controller_name(spec.name),
        namespace=NAMESPACE,
        lifetime="detached",
        max_restarts=-1,
        max_concurrency=CONTROLLER_THREADS,
        num_cpus=0,
        memory=SOME_MEMORY_BYTES,
        scheduling_strategy=NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True),
    )
    try:
        controller.remote(order)
    except ValueError as error:  # Ray's word for a name that is taken
        raise ConfigError(
            f"another `splitserve up` or `splitserve upgrade` has just created the controller of {spec.name}: choose "
            "another --name, or end that cluster first"
        ) from error
    remember_order(spec.name, order)


class RayClient:
    """Client of a cluster on Ray; see :class:`splitserve.orchestration.cli.client.ClusterClient`. Connects at the first
    request."""

    def __init__(self, name: str, address: str) -> None:
        self._name = name
        self._address = address

    def ask(self, request: AnyRequest) -> AnyReply:
        data: bytes = self._call(lambda controller: controller.ask.remote(encode(request)))
        return decode_reply(data)

    def bring_code(self) -> None:
        """Replace the controller by one with this driver's code; agents inherit it. A cluster that has lost its
        controller gets one. Raises :class:`ConfigError`, before anything has changed, if that code couldn't take over
        the cluster."""
        import ray

        from splitserve.orchestration.ray.controller import ControllerOrder
        from splitserve.orchestration.ray.stored_state import order_of, recall, remember_order

        connect(self._address, with_code=True)
        stored = order_of(self._name)
        if stored is None or self.is_alive():
            stored = self._call(lambda controller: controller.order.remote())
            if not status_of(self).is_settled:
                raise ConfigError(
                    "workers are still starting or leaving: wait until `splitserve status` shows all of them ready"
                )
        order = msgspec.json.decode(stored, type=ControllerOrder)
        recall(self._name)
        remember_order(self._name, stored)  # if this process ends before there is another controller
        if (controller := self._controller()) is not None:
            ray.kill(controller)
        while self._controller() is not None:
            time.sleep(0.05)
        if order_of(self._name) is None:
            raise ConfigError(
                f"cluster {self._name} was ended by `splitserve down` during this upgrade: start it anew with "
                "`splitserve up`"
            )
        spec = convert_spec(order.spec)
        create_controller(spec, order.log_level, restart=order.restart, entries=Entries(*order.entries))
        self.follow_start(lambda _progress: None)

    def log_names(self) -> list[str]:
        names: list[str] = self._call(lambda controller: controller.log_names.remote())
        return names

    def read_log(self, name: str, num_lines: int, offset: int) -> tuple[str, int]:
        text, end = self._call(lambda controller: controller.read_log.remote(name, num_lines, offset))
        return text, end

    def is_alive(self) -> bool:
        return self._controller() is not None

    def is_headless(self) -> bool:
        """Return whether the cluster has lost its controller for good: Ray won't restart it."""
        from splitserve.orchestration.ray.stored_state import order_of

        return self._controller() is None and order_of(self._name) is not None

    def headless(self) -> str:
        """Return the description of a cluster without a controller, with the commands that help."""
        options = f"--ray {self._address} --name {self._name}"
        return (
            f"cluster {self._name} has no controller: `splitserve upgrade` was ended after it had removed the old one, "
            "or the actor was killed. Router and workers serve on, but none is started again or replaced. "
            f"`splitserve upgrade {options}` creates a controller, which takes them over; "
            f"`splitserve down {options}` ends them"
        )

    def follow_start(self, show: Callable[[ChildProgress], None]) -> str:
        """Show the progress until the cluster serves; returns its URL. Shows the steps of a controller that Ray has
        restarted meanwhile from the beginning. Raises :class:`LaunchError`."""
        from splitserve.orchestration.ray.controller import Step

        life, num_seen = "", 0
        while True:
            before = life
            life, steps = self._call(partial(_steps, life=life, after=num_seen))
            num_seen = num_seen if life == before else 0
            for data in steps:
                num_seen += 1
                step = msgspec.json.decode(data, type=Step)
                if step.name:
                    show(ChildProgress(step.name, step.stage, step.detail))
                elif step.stage == "serving":
                    return step.detail["url"]
                else:
                    raise LaunchError(step.detail.get("message", "the cluster ended"))

    def down(self, say: Say, *, forget: bool = False) -> None:
        import ray

        del forget
        controller = self._controller()
        if controller is None:
            say(f"{self._name}: its controller is gone; removing what it has left")
        else:
            try:
                self._stop(controller)
                say(f"{self._name}: all processes have ended")
            except (ray.exceptions.RayError, OperationError) as error:
                say(f"{self._name}: its controller doesn't answer ({type(error).__name__}); removing everything")
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(controller)
        self._remove_leftovers(say)

    def leftovers(self) -> list[str]:
        """Return the names of all of the cluster's actors and placement groups on Ray."""
        from splitserve.orchestration.ray.host import agents_of, groups_of
        from splitserve.orchestration.ray.stored_state import stored_keys

        found = [agent_name for _, agent_name, _ in agents_of(self._name)]
        found += list(groups_of(self._name))
        found += [controller_name(self._name)] if self._controller() is not None else []
        return found + stored_keys(self._name)

    def _stop(self, controller: Any) -> None:
        import ray

        ray.get(controller.ask.remote(encode(Stop())), timeout=REPLY_SECONDS)
        deadline = time.monotonic() + STOP_SECONDS
        while not ray.get(controller.is_over.remote(), timeout=REPLY_SECONDS):
            if time.monotonic() > deadline:
                raise OperationError("the controller takes too long to end")
            time.sleep(0.05)

    def _remove_leftovers(self, say: Say) -> None:
        """Remove everything that the controller would have removed."""
        import ray
        from ray.util.placement_group import remove_placement_group

        from splitserve.orchestration.ray.host import FINISH_SECONDS, agents_of, end_agents, groups_of
        from splitserve.orchestration.ray.stored_state import forget

        left = []
        for name, agent_name, _ in list(agents_of(self._name)):
            say(f"  {name} was left over: killed")
            with contextlib.suppress(ValueError):
                left.append(ray.get_actor(agent_name, namespace=NAMESPACE))
        end_agents(left, FINISH_SECONDS)
        for group in groups_of(self._name).values():
            remove_placement_group(group)
        forget(self._name)

    def _controller(self) -> Any:
        import ray

        connect(self._address)
        try:
            return ray.get_actor(controller_name(self._name), namespace=NAMESPACE)
        except ValueError:
            return None

    def _call(self, method: Callable[[Any], Any]) -> Any:
        """Call a method of the controller; waits for one that is being restarted or replaced. Raises
        :class:`ConfigError`."""
        import ray

        from splitserve.orchestration.ray.stored_state import order_of

        began = time.monotonic()
        while True:
            controller = self._controller()
            if controller is None:
                if order_of(self._name) is None:
                    raise ConfigError(f"there is no cluster called {self._name} on the Ray cluster at {self._address}")
                if time.monotonic() > began + REPLACEMENT_SECONDS:
                    raise ConfigError(self.headless())
                time.sleep(0.2)
                continue
            try:
                return ray.get(method(controller), timeout=REPLY_SECONDS)
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
                if time.monotonic() > began + COMEBACK_SECONDS:
                    raise ConfigError(f"the controller of {self._name} doesn't answer: {error}") from error
                time.sleep(0.2)


def _steps(controller: Any, life: str, after: int) -> Any:
    return controller.steps.remote(life, after)
