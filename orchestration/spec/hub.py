"""Models of the Hugging Face Hub: the directory in this machine's cache that a spec's model id stands for.

Each machine has a cache of its own (HF_HOME); what it lacks is downloaded, with HF_TOKEN for a gated model, unless
HF_HUB_OFFLINE is set. Only the files that Splitserve reads are downloaded.
"""

import errno
from pathlib import Path

import msgspec

from splitserve.common.errors import CheckpointError
from splitserve.models.weights.checkpoint import weight_files
from splitserve.orchestration.spec.cluster_spec import ClusterSpec
from splitserve.orchestration.spec.model_source import is_model_id

SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
)
WEIGHTS = "*.safetensors"
NOT_THESE = ("*/*", "consolidated*")  # folders of other formats, and Mistral's second copy of its weights
_PIN_SECONDS = 10.0


def with_local_model(spec: ClusterSpec) -> ClusterSpec:
    """Return ``spec`` with the directory of its model on this machine, downloaded if need be, in place of a model id.

    Progress is shown on standard error. Raises :class:`CheckpointError`.
    """
    model = spec.model
    if not is_model_id(model.path):
        return spec
    directory = download(model.path, model.revision, with_weights=model.load_format != "dummy")
    names = {"served_name": spec.served_model_name, "path": directory, "revision": ""}
    return msgspec.structs.replace(spec, model=msgspec.structs.replace(model, **names))


def pinned(spec: ClusterSpec) -> ClusterSpec:
    """Return ``spec`` with the commit of its model's revision, so that all machines of a cluster load the same one.

    Where the Hub doesn't answer here, the revision stays: the machines may reach it, or have it in their caches.
    """
    if not is_model_id(spec.model.path):
        return spec
    from huggingface_hub import HfApi

    try:
        info = HfApi().model_info(spec.model.path, revision=spec.model.revision or None, timeout=_PIN_SECONDS)
    except Exception:  # of the library's HTTP client, which differs between its versions
        return spec
    return msgspec.structs.replace(spec, model=msgspec.structs.replace(spec.model, revision=info.sha or ""))


def download(model_id: str, revision: str = "", *, with_weights: bool = True) -> str:
    """Return the directory of a model in this machine's cache; download the files that are missing there.

    Raises :class:`CheckpointError` with the remedy: another id, access to the model, or the command that downloads it.
    """
    from huggingface_hub import constants, errors, snapshot_download

    wanted = [*SMALL_FILES, *([WEIGHTS] if with_weights else [])]
    at = f" at revision {revision}" if revision else ""
    command, page = download_command(model_id, revision, wanted), f"{constants.ENDPOINT}/{model_id}"
    try:
        directory = snapshot_download(
            model_id, revision=revision or None, allow_patterns=wanted, ignore_patterns=list(NOT_THESE)
        )
    except errors.GatedRepoError:
        raise CheckpointError(
            f"the model {model_id} is gated: accept its terms on {page}, and set HF_TOKEN to a token of that account. "
            f"To try the access: {command}"
        ) from None
    except errors.RepositoryNotFoundError:
        raise CheckpointError(
            f"there is neither a directory {model_id} here nor a model of that id on the Hugging Face Hub; if the "
            f"model is private, set HF_TOKEN; to try the access: {command}"
        ) from None
    except errors.RevisionNotFoundError:
        raise CheckpointError(
            f"the model {model_id} has no revision {revision!r}: see its branches and tags on {page}/tree/main, "
            f"or leave the revision out; to download its main branch: {download_command(model_id, '', wanted)}"
        ) from None
    except (errors.LocalEntryNotFoundError, errors.IncompleteSnapshotError, errors.OfflineModeIsEnabled):
        raise CheckpointError(_not_cached(model_id, revision, f"the model {model_id}{at} isn't", wanted)) from None
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CheckpointError(
                f"no space left in the cache {constants.HF_HUB_CACHE} for the model {model_id}{at}: free some, or set "
                f"HF_HOME to a directory with more; to continue the download: {command}"
            ) from None
        raise CheckpointError(
            f"can't download the model {model_id}{at}: {error}; to try it alone: {command}"
        ) from error
    if problem := _missing(directory, with_weights=with_weights):
        raise CheckpointError(_not_cached(model_id, revision, f"{problem}: the model {model_id}{at} is partly", wanted))
    return directory


def _not_cached(model_id: str, revision: str, what: str, wanted: list[str]) -> str:
    from huggingface_hub import constants

    why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the Hugging Face Hub can't be reached"
    return (
        f"{what} in this machine's cache ({constants.HF_HUB_CACHE}), and {why}. Download it where the Hub can be "
        f"reached, to this cache: {download_command(model_id, revision, wanted)}"
    )


def download_command(model_id: str, revision: str, wanted: list[str]) -> str:
    """Return the command that downloads the files ``wanted`` of a model to the cache."""
    parts = ["hf", "download", model_id, *(("--revision", revision) if revision else ())]
    parts += [part for pattern in wanted for part in ("--include", f"'{pattern}'")]
    parts += [part for pattern in NOT_THESE for part in ("--exclude", f"'{pattern}'")]
    return " ".join(parts)


def _missing(directory: str, *, with_weights: bool) -> str:
    """Return what a snapshot lacks, "" for nothing: without the Hub, an interrupted download looks like a whole one."""
    for name in ("config.json", "tokenizer.json"):
        if not (Path(directory) / name).is_file():
            return f"{name} is missing"
    try:
        if with_weights:
            weight_files(Path(directory))
    except CheckpointError as error:
        return str(error)
    return ""
