"""The served model as options and clients describe it: ids, sampling defaults, chat template, allowed origins."""

import json

import anthropic
import openai
import pytest

from router_harness import RouterProcess, ready, served_router, write_model_dir
from splitserve.benchmarks.router.worker_script import default_script
from splitserve.common.errors import CheckpointError, ConfigError
from splitserve.protocol.request import Role
from splitserve.router.text.sampling_defaults import read_sampling_defaults

PAGE = "https://app.example.com"
TEMPLATE = "{% for message in messages %}{{ message.content }}!{% endfor %}"


def write_generation_config(folder, **fields):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1]} | fields))


@pytest.fixture(scope="module")
def worker():
    return []


@pytest.fixture(scope="module")
def router(tmp_path_factory, worker):
    path = tmp_path_factory.mktemp("served") / "tiny"
    write_model_dir(path)
    write_generation_config(path, temperature=0.25, top_k=7, top_p=None, repetition_penalty=1.5, do_sample=True)
    template = path.parent / "template.jinja"
    template.write_text(TEMPLATE)
    settings = {"aliases": ["small", "tiny"], "allowed_origins": [PAGE], "chat_template": str(template)}
    with served_router(path, **settings) as (process, workers):
        worker.append(workers.start("m0", Role.MIXED, default_script(tokens_per_message=1), max_model_len=256))
        ready(process)
        yield process


def sampling_of(router, worker, **fields):
    worker[0].requests.clear()
    assert router.request("POST", "/v1/completions", {"prompt": [40, 41], "max_tokens": 1} | fields)[0] == 200
    return worker[0].requests[0].sampling


def test_the_checkpoints_sampling_defaults_apply_where_the_request_sets_none(router, worker):
    sampling = sampling_of(router, worker)
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.25, 7, 1.0)
    assert sampling.repetition_penalty == 1.5
    sampling = sampling_of(router, worker, temperature=1, top_k=-1, top_p=0.5, repetition_penalty=1)
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (1.0, 0, 0.5)
    assert sampling.repetition_penalty == 1.0


def test_the_defaults_are_shown_with_the_model(router):
    _, _, card = router.request("GET", "/v1/models/small")
    assert card["sampling_defaults"] == {"temperature": 0.25, "top_k": 7, "repetition_penalty": 1.5}
    assert (card["id"], card["root"], card["max_model_len"]) == ("small", "tiny", 256)


def test_the_context_length_is_not_known_without_workers(tmp_path):
    write_model_dir(tmp_path / "tiny")
    with served_router(tmp_path / "tiny") as (process, _):
        [card] = process.request("GET", "/v1/models")[2]["data"]
        assert card["max_model_len"] is None


def test_the_model_has_all_its_ids_and_may_be_left_out(router):
    with openai.OpenAI(base_url=router.url + "/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["tiny", "small"]
        for name in ("tiny", "small"):
            assert client.completions.create(model=name, prompt="a", max_tokens=1).model == name
    assert router.request("POST", "/v1/completions", {"prompt": "a", "max_tokens": 1})[2]["model"] == "tiny"
    status, _, answer = router.request("POST", "/v1/completions", {"prompt": "a", "model": "huge"})
    assert status == 404 and "'tiny', 'small'" in answer["error"]["message"]


def test_anthropics_client_lists_the_model(router):
    with anthropic.Anthropic(base_url=router.url, api_key="none", max_retries=0) as client:
        page = client.models.list()
        assert [(model.id, model.display_name, model.type) for model in page] == [
            ("tiny", "tiny", "model"),
            ("small", "small", "model"),
        ]
        assert (page.has_more, page.first_id, page.last_id) == (False, "tiny", "small")
        model = client.models.retrieve("small")
        assert model.created_at.timestamp() == model.created and (model.type, model.display_name) == ("model", "small")
        with pytest.raises(anthropic.NotFoundError, match="the model 'huge' does not exist"):
            client.models.retrieve("huge")


def test_the_chat_template_of_the_option_replaces_the_models(router, worker):
    worker[0].requests.clear()
    body = {"messages": [{"role": "user", "content": "The quick"}], "max_tokens": 1}
    status, _, answer = router.request("POST", "/v1/chat/completions", body)
    assert status == 200
    _, _, plain = router.request("POST", "/v1/completions", {"prompt": "The quick!", "max_tokens": 1})
    assert answer["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    assert worker[0].requests[0].token_ids == worker[0].requests[1].token_ids


def test_hints_that_change_nothing_are_accepted(router):
    hints = {
        "metadata": {"team": "search"},
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "safety_identifier": "u-1",
        "service_tier": "flex",
        "user": "eve",
        "verbosity": "low",
        "prediction": {"type": "content", "content": "a"},
    }
    body = {"prompt": "a", "max_tokens": 1}
    assert router.request("POST", "/v1/completions", body | hints)[0] == 200
    assert router.request("POST", "/v1/completions", body | dict.fromkeys(hints))[0] == 200


def test_context_errors_have_the_words_by_which_clients_know_them(router):
    long = [40] * 256
    for body in ({"prompt": long}, {"prompt": "a b " * 20_000}, {"prompt": [40], "max_tokens": 300}):
        status, _, answer = router.request("POST", "/v1/completions", body)
        assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
        assert "this model's maximum context length is 256 tokens" in answer["error"]["message"]


# ---- pages of other origins ----


def preflight(router, origin):
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    return router.request("OPTIONS", "/v1/completions", None, Origin=origin, **asked)


def test_pages_of_allowed_origins_may_call_and_read(router):
    status, headers, _ = preflight(router, PAGE)
    assert status == 200 and headers["access-control-allow-origin"] == PAGE
    assert "authorization" in headers["access-control-allow-headers"].lower()
    assert "POST" in headers["access-control-allow-methods"]
    status, headers, _ = router.request("POST", "/v1/completions", {"prompt": "a", "max_tokens": 1}, Origin=PAGE)
    assert status == 200 and headers["access-control-allow-origin"] == PAGE


def test_other_pages_and_host_names_stay_refused_on_a_loopback_server(router):
    for origin in ("https://evil.example.com", PAGE + ".evil.com", "http://app.example.com", "null"):
        status, headers, answer = preflight(router, origin)
        assert (status, answer["error"]["code"]) == (403, "foreign_origin")
        assert "access-control-allow-origin" not in headers
    status, _, answer = router.request("GET", "/v1/models", None, Origin=PAGE, Host="app.example.com")
    assert (status, answer["error"]["code"]) == (403, "foreign_host")


def test_every_origin_at_once_needs_a_key(tmp_path):
    write_model_dir(tmp_path / "tiny")
    with pytest.raises(RuntimeError, match=r"--allowed-origins '\*' lets every web page .* API key"):
        RouterProcess(tmp_path / "tiny", allowed_origins=["*"])
    router = RouterProcess(tmp_path / "tiny", allowed_origins=["*"], api_key="k")
    try:
        status, headers, _ = preflight(router, "https://any.example.com")  # preflights carry no key
        assert status == 200 and headers["access-control-allow-origin"] == "*"
        status, headers, _ = router.request("GET", "/v1/models", None, Origin="https://any.example.com")
        assert status == 401 and headers["access-control-allow-origin"] == "*"
    finally:
        router.stop()


# ---- generation_config.json ----


def test_which_file_gives_the_defaults(tmp_path):
    model, other = tmp_path / "model", tmp_path / "other"
    for folder, temperature in ((model, 0.6), (other, 0)):
        folder.mkdir()
        write_generation_config(folder, temperature=temperature, top_p=1.0, max_new_tokens=5)
    auto = read_sampling_defaults("auto", model)
    assert auto.values == {"temperature": 0.6} and auto.source == str(model / "generation_config.json")
    assert auto.describe() == "temperature 0.6"
    assert read_sampling_defaults("none", model).values == {}
    assert read_sampling_defaults(str(other), model).values == {"temperature": 0}
    assert read_sampling_defaults("auto", tmp_path).values == {}
    with pytest.raises(ConfigError, match=r"there is no .*generation_config\.json; give auto, none or a directory"):
        read_sampling_defaults(str(tmp_path), model)


@pytest.mark.parametrize(
    "fields", [{"temperature": -1}, {"top_p": 0}, {"top_k": "many"}, {"temperature": True}, {"min_p": 2}]
)
def test_defaults_that_no_request_could_have_are_refused(tmp_path, fields):
    write_generation_config(tmp_path, **fields)
    with pytest.raises(CheckpointError, match=rf"generation_config.json: {next(iter(fields))} is .*none"):
        read_sampling_defaults("auto", tmp_path)
    assert read_sampling_defaults("none", tmp_path).values == {}
