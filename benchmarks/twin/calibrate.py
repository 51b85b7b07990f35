"""``splitserve calibrate``: save what the workers of a running cluster have fitted to their own steps.

Workers fit a model of their step times while they serve; after 200 steps it counts as measured. Run a load like the one
that you want to simulate, then this command. Its file is for `splitserve simulate` and `splitserve plan`.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from splitserve.benchmarks.common.report import table
from splitserve.benchmarks.twin.calibration import MODEL_HEADERS, model_row, of_cluster, report_of
from splitserve.common.errors import ConfigError
from splitserve.orchestration.cli.command_parser import CommandParser
from splitserve.orchestration.cli.operate import add_operators_key_option
from splitserve.orchestration.spec.expansion import read_operators_key
from splitserve.orchestration.spec.sizes import format_bytes


def main(argv: Sequence[str]) -> int:
    """Read the cluster's models, show them and write the file. Raises :class:`SplitserveError`."""
    parser = CommandParser(prog="splitserve calibrate", description=__doc__.partition("\n\n")[2])
    parser.add_argument("--against", required=True, metavar="URL", help="endpoint of the running cluster")
    add_operators_key_option(parser)
    parser.add_argument("--output", default="calibration.json", metavar="FILE", help="file to write")
    options = parser.parse_args(list(argv))
    found = of_cluster(report_of(options.against, read_operators_key(options.api_key_file)), options.against)
    rows = [model_row(str(role), model, found.errors.get(role)) for role, model in found.steps.items()]
    print(table(rows, MODEL_HEADERS))
    print(f"link: {found.link.bytes_per_second / 1e9:.2f} GB/s")
    if found.host_kv_bytes:
        size, rate = format_bytes(found.host_kv_bytes), found.copies.bytes_per_second / 1e9
        print(f"host tier: {size} of each worker, loaded at {rate:.2f} GB/s")
    try:
        Path(options.output).write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    except OSError as error:
        raise ConfigError(f"--output {options.output}: {error.strerror}") from error
    print(f"written to {options.output}")
    return 0
