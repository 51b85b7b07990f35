// The page: asks for the overview every two seconds and shows it.

const PERIOD_MS = 2000;
const KEY = "splitserve-key";
const HISTORY = 60;
const history = [];
const state = { isPaused: false, timer: 0, view: null, chosen: null, heardAt: 0 };
const byId = (id) => document.getElementById(id);

async function refresh() {
  clearTimeout(state.timer);
  try {
    const key = sessionStorage.getItem(KEY);
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    const answer = await fetch("admin/overview", { headers, cache: "no-store" });
    if (key !== sessionStorage.getItem(KEY)) return; // another one was given meanwhile
    const realm = /realm="(.+)"/.exec(answer.headers.get("www-authenticate"));
    if (realm) return askForKey(realm[1], key !== null);
    if (!answer.ok) throw new Error(await reasonOf(answer));
    state.view = await answer.json();
    state.heardAt = Date.now();
    byId("trouble").hidden = byId("key-form").hidden = true;
    render();
  } catch (error) {
    trouble(error);
  }
  if (!state.isPaused) state.timer = setTimeout(refresh, PERIOD_MS);
}

async function reasonOf(answer) {
  const body = await answer.json().catch(() => ({}));
  return `the router answered ${answer.status}${body.error ? `: ${body.error.message}` : ""}`;
}

// `name`: what kind of key it is, as the router's answer says.
function askForKey(name, isWrong) {
  sessionStorage.removeItem(KEY);
  const why = isWrong ? `The router refuses this key: it is not the cluster's ${name}.` : `This page needs the cluster's ${name}.`;
  byId("key-name").textContent = name[0].toUpperCase() + name.slice(1);
  byId("key-why").textContent = `${why} What you enter is kept in this tab only, until it is closed.`;
  byId("content").hidden = byId("trouble").hidden = true;
  byId("key-form").hidden = false;
  byId("key").focus();
}

function trouble(error) {
  const since = state.heardAt ? ` since ${new Date(state.heardAt).toLocaleTimeString()}; what follows is old` : "";
  byId("trouble").textContent = `No figures from the router${since} (${error.message}).`;
  byId("trouble").hidden = false;
}

function render() {
  const view = state.view;
  byId("content").hidden = false;
  byId("model").textContent = view.served_model_name;
  const routers = view.num_routers > 1 ? `: one of ${view.num_routers} routers; requests/s and tokens/s are of all` : "";
  byId("where").textContent = `${view.version} on ${view.machine}${routers}`;
  byId("clock").textContent = `as of ${new Date(1000 * view.clock_seconds).toLocaleTimeString()}`;
  byId("window").textContent = view.seconds.toFixed(0);
  document.title = `${{ idle: "idle", healthy: "healthy", limited: "limited" }[view.diagnosis.state]} - Splitserve`;
  remember(view);
  renderVerdict(view.diagnosis);
  renderNumbers(view);
  renderPrefill(view);
  renderDecode(view);
  renderHandover(view);
  renderPath(view);
  renderHits(view);
  renderObjectives(view);
  renderStages(view);
  renderWorkers(view);
  renderSlow(view);
}

const FIGURES = {
  requests: (view) => view.rates.requests_per_second,
  output: (view) => view.rates.output_tokens_per_second,
  prompt: (view) => view.rates.prompt_tokens_per_second,
  ttft: (view) => view.ttft.p50,
  itl: (view) => view.itl.p50,
  flight: (view) => view.router.num_in_flight,
  router: (view) => view.router.busy_share,
  waiting: (view) => view.router.queued_tokens + sum(promptWorkers(view), (worker) => worker.waiting_tokens),
};

function remember(view) {
  history.push(Object.fromEntries(Object.entries(FIGURES).map(([name, figure]) => [name, figure(view)])));
  if (history.length > HISTORY) history.shift();
}

const trend = (name) => (history.length > 1 ? sparkline(history.map((each) => each[name])) : null);
const sum = (rows, value) => rows.reduce((total, row) => total + value(row), 0);
const isAlive = (worker) => worker.state === "ready" || worker.state === "draining";
const ofRole = (view, role) => view.workers.filter((worker) => worker.role === role && isAlive(worker));
const promptWorkers = (view) => [...ofRole(view, "prefill"), ...ofRole(view, "mixed")];
const tokenWorkers = (view) => [...ofRole(view, "decode"), ...ofRole(view, "mixed")];

function renderVerdict(diagnosis) {
  const verdict = byId("verdict");
  verdict.dataset.state = diagnosis.state;
  verdict.dataset.level = diagnosis.findings.length && diagnosis.findings[0].severity >= 0.5 ? "high" : "";
  if (byId("sentence").textContent !== diagnosis.sentence) byId("sentence").textContent = diagnosis.sentence;
  const [first, ...others] = diagnosis.findings;
  const reasons = (found) => (found.reasons.length ? h("ul", {}, found.reasons.map((reason) => h("li", {}, reason))) : null);
  const remedy = (found) => h("p", { class: "remedy" }, h("b", {}, "What to do: "), rich(found.remedy));
  const more = others.map((found) => h("div", { class: "more" }, h("h3", {}, `${found.sentence} (${percent(found.severity)})`), reasons(found), remedy(found)));
  show("findings", first && [reasons(first), remedy(first)],
    others.length > 0 && h("details", { "data-key": "more" }, h("summary", { "data-key": "more-summary" }, `${others.length} more ${others.length === 1 ? "finding" : "findings"}`), more));
}

function renderNumbers(view) {
  const number = (name, value, detail, key) => h("div", {}, h("dt", {}, name), h("dd", {}, value, h("small", {}, detail || "\u00a0")), trend(key));
  const times = (of) => (of.num ? [duration(of.p50), `p99 ${duration(of.p99)}`] : ["-", ""]);
  show("numbers",
    number("Requests/s", short(view.rates.requests_per_second), view.rates.failures_per_second > 0 ? `${short(view.rates.failures_per_second)} fail` : "", "requests"),
    number("In flight", count(view.router.num_in_flight), view.router.num_waiting + view.router.num_queued ? `${count(view.router.num_waiting + view.router.num_queued)} wait` : "", "flight"),
    number("Time to first token", ...times(view.ttft), "ttft"),
    number("Time per output token", ...times(view.itl), "itl"),
    number("Prompt tokens/s", short(view.rates.prompt_tokens_per_second), "", "prompt"),
    number("Output tokens/s", short(view.rates.output_tokens_per_second), "", "output"),
    number("Router busy", percent(view.router.busy_share), view.router.lag_seconds > 0.02 ? `up to ${duration(view.router.lag_seconds)} late` : "", "router"));
}

function renderPrefill(view) {
  const workers = promptWorkers(view);
  if (!workers.length) return show("prefill", h("p", { class: "note" }, "No worker computes prompts now."));
  const tokens = FIGURES.waiting(view);
  const perSecond = sum(workers, (worker) => worker.prompt_tokens_per_second);
  const busy = sum(workers, (worker) => worker.busy_share) / workers.length;
  const drain = tokens && perSecond > 0 ? `, ${duration(tokens / perSecond)} of work` : "";
  const wait = view.stages.find((stage) => stage.name === "prefill_queue");
  const queued = view.router.num_queued;
  show("prefill",
    h("p", { class: "big" }, count(tokens), h("small", {}, ` prompt tokens wait${drain}`)),
    bar("Prefill workers", [{ name: "busy", value: busy, color: busy > 0.85 ? "amber" : "blue" }], 1),
    h("p", { class: "note" }, `${workers.length} ${workers[0].role} ${workers.length === 1 ? "worker" : "workers"}, busy ${percent(busy)} of the time, ${short(perSecond)} tokens/s`),
    wait && h("p", { class: "note" }, `a prompt waits ${duration(wait.times.p50)} (p99 ${duration(wait.times.p99)}) for its first step`),
    queued > 0 && h("p", { class: "note" }, `${count(queued)} requests with ${count(view.router.queued_tokens)} tokens are still in the router`),
    trend("waiting"));
}

function kvParts(worker) {
  return [
    { name: "used", value: worker.blocks_used, color: "blue" },
    { name: "reserved, empty", value: worker.blocks_reserved, color: "hatch" },
    { name: "cached", value: worker.blocks_cached, color: "pale" },
  ];
}

function renderDecode(view) {
  const workers = tokenWorkers(view);
  if (!workers.length) return show("decode", h("p", { class: "note" }, "No worker decodes now."));
  const total = { blocks: 0, blocks_used: 0, blocks_reserved: 0, blocks_cached: 0 };
  for (const name of Object.keys(total)) total[name] = sum(workers, (worker) => worker[name]);
  const blocks = Math.max(total.blocks, 1);
  const parts = kvParts(total);
  const free = Math.max(0, total.blocks - sum(parts, (part) => part.value));
  const running = sum(workers, (worker) => worker.num_running);
  const places = sum(workers, (worker) => worker.max_num_seqs);
  show("decode",
    h("p", { class: "big" }, percent((total.blocks_used + total.blocks_reserved) / blocks), h("small", {}, " in use")),
    bar("Decode KV", parts, blocks),
    legend([...parts, { name: "free", value: free, color: "none" }], (part) => percent(part.value / blocks)),
    h("p", { class: "note" }, `${running} of ${places} sequences decode on ${workers.length} ${workers.length === 1 ? "worker" : "workers"}`));
}

function renderHandover(view) {
  const used = view.transports.filter((transport) => transport.num);
  const shown = used.length ? used : view.transports.slice(0, 1);
  if (!shown.length) return show("handover", h("p", { class: "note" }, "No KV is handed over: there is no pair of prefill and decode workers, or they have not connected."));
  show("handover", shown.map((transport) => [
    h("p", { class: "big" }, transport.num ? speed(transport.read_bytes_per_second) : "-", h("small", {}, ` by ${transport.transport}, while reading`)),
    bar("Speed against the link", [{ name: "read", value: Math.min(transport.read_bytes_per_second, Math.max(transport.link_bytes_per_second, 1)), color: transport.problem ? "amber" : "green" }], Math.max(transport.link_bytes_per_second, 1)),
    h("p", { class: "note" }, `a thread's large read on the link: ${speed(transport.link_bytes_per_second)}`),
    h("p", { class: "note" }, transport.num
      ? `${count(transport.num)} hand-overs, ${speed(transport.bytes_per_second)} on average; after the prompt is computed one takes ${duration(transport.exposed.p50)} (p99 ${duration(transport.exposed.p99)})`
      : "no hand-over in this time"),
    transport.problem && h("p", { class: "problem" }, transport.problem),
  ]));
}

const HARMLESS = new Set(["cached_on_decode", "ended_with_first_token"]);

function renderPath(view) {
  const all = Math.max(sum(view.paths, (path) => path.num), 1);
  if (!view.paths.length) return show("path", h("p", { class: "note" }, "No request has ended in this time."));
  const kind = (path) => {
    if (path.actual === "failed") return "bad";
    if (path.actual === "cancelled") return "";
    return path.actual !== path.intended && !HARMLESS.has(path.reason) ? "warn" : "good";
  };
  show("path", table("Requests that ended, by intended and actual path", [
    { name: "intended", cell: (path) => path.intended },
    { name: "actual", cell: (path) => [tag(path.actual, kind(path)), ["ok", path.actual].includes(path.reason) ? "" : h("div", { class: "why" }, path.reason.replaceAll("_", " "))] },
    { name: "requests", cell: (path) => count(path.num), isNumber: true },
    { name: "share", cell: (path) => percent(path.num / all), isNumber: true },
  ], view.paths.slice(0, 6), true));
}

function renderHits(view) {
  const prompts = view.prompts;
  if (!prompts.tokens) return show("hits", h("p", { class: "note" }, "No prompt has been computed in this time."));
  const known = prompts.known_tokens === null ? null : Math.max(prompts.known_tokens, prompts.cached_tokens);
  const below = view.hits.filter((tier) => tier.tier !== "device" && tier.tokens > 0);
  const found = prompts.cached_tokens;
  const inTiers = Math.min(found, sum(below, (tier) => tier.tokens));
  const colors = ["green", "amber", "grey"];
  const parts = [{ name: "device", value: found - inTiers, color: "blue" },
    ...below.map((tier, index) => ({ name: tier.tier, value: Math.min(tier.tokens, found), color: colors[index % 3] }))];
  const missed = known === null ? [] : [{ name: "missed", value: known - found, color: "hatch" }];
  show("hits",
    h("p", { class: "big" }, percent(found / prompts.tokens), h("small", {}, known === null ? " of the prompt tokens" : ` of the prompt tokens; possible: ${percent(known / prompts.tokens)}`)),
    bar("Prompt tokens", [...parts, ...missed], prompts.tokens),
    legend([...parts, ...missed], (part) => percent(part.value / prompts.tokens)),
    h("p", { class: "note" }, known === null ? "With a single worker the possible hits are not counted." : "Possible: tokens with which an earlier prompt began."));
}

function renderObjectives(view) {
  if (!view.objectives.length) return show("objectives", h("p", { class: "note" }, "The cluster has none: ", h("code", {}, "objectives"), " in the spec sets them for TTFT and time per token."));
  const names = { ttft: "Time to first token", tpot: "Time per output token" };
  show("objectives", view.objectives.map((each) => {
    const met = each.num ? each.num_met / each.num : 1;
    return [
      h("p", {}, h("b", {}, names[each.name] || each.name), ` within ${duration(each.seconds)}: `, each.num ? `${percent(met)} of ${count(each.num)}` : "no request"),
      bar(each.name, [{ name: "met", value: met, color: met >= 0.95 ? "green" : "amber" }], 1),
    ];
  }));
}

const STAGE_COLORS = { receive: "amber", prepare: "grey", queue: "amber", retries: "red", dispatch: "amber", grant_wait: "hatch", prefix_read: "green", prefill_queue: "amber", prefill: "blue", handover: "green", choice: "pale", delivery: "grey", write: "grey", unexplained: "grey" };

function renderStages(view) {
  if (!view.stages.length) return show("stages", h("p", { class: "note" }, "No first token in this time."));
  const parts = view.stages.map((stage) => ({ name: stage.name, value: stage.times.mean, color: STAGE_COLORS[stage.name] || "grey" }));
  const total = Math.max(sum(parts, (part) => part.value), 1e-12);
  const columns = (share) => [
    { name: "stage", cell: (stage) => [share && h("i", { class: `dot c-${STAGE_COLORS[stage.name] || "grey"}` }), stage.name.replaceAll("_", " ")] },
    { name: "mean", cell: (stage) => duration(stage.times.mean), isNumber: true },
    ...(share ? [{ name: "share", cell: share, isNumber: true }] : []),
    { name: "p99", cell: (stage) => duration(stage.times.p99), isNumber: true },
    { name: "meaning", cell: (stage) => stage.meaning, isText: true },
  ];
  show("stages", bar("Mean time to first token", parts),
    table("Stages of the time to first token", columns((stage) => percent(stage.times.mean / total)), view.stages, true),
    view.handover_stages.length && h("details", { "data-key": "after" },
      h("summary", { "data-key": "after-summary" }, "After the first token: the hand-over"),
      table("Stages of the hand-over", columns(null), view.handover_stages, true)));
}

function stateOf(worker) {
  const silent = worker.silent_seconds > 3 ? `, silent for ${duration(worker.silent_seconds)}` : "";
  const kinds = { ready: "good", draining: "warn", connecting: "warn", lost: "bad" };
  return tag(`${worker.state}${silent}`, silent && worker.state === "ready" ? "warn" : kinds[worker.state]);
}

function renderWorkers(view) {
  if (!view.workers.length) return show("workers", h("p", { class: "note" }, "No worker has registered."));
  const notes = (worker) => [
    worker.slowness >= 1.5 ? `${worker.slowness.toFixed(1)} x as slow as its peers` : "",
    worker.num_failures ? `${worker.num_failures} failed attempts` : "",
    worker.kv_bytes && worker.remote_bytes > 0.05 * worker.kv_bytes ? `${bytes(worker.remote_bytes)} of KV on another NUMA node` : "",
    ...worker.tiers_down.map((tier) => `tier ${tier} is down`),
  ].filter(Boolean).join("; ");
  show("workers", table("Workers", [
    { name: "worker", cell: (worker) => worker.engine_id },
    { name: "role", cell: (worker) => worker.role },
    { name: "state", cell: stateOf },
    { name: "breaker", cell: (worker) => (worker.breaker === "open" ? tag(`open, ${worker.breaker_seconds.toFixed(0)} s`, "bad") : worker.breaker) },
    { name: "busy", cell: (worker) => percent(worker.busy_share), isNumber: true },
    { name: "decode", cell: (worker) => `${worker.num_running} / ${worker.max_num_seqs}`, isNumber: true },
    { name: "queue", cell: (worker) => count(worker.waiting_tokens), isNumber: true },
    { name: "KV", cell: (worker) => bar(`KV of ${worker.engine_id}`, kvParts(worker), worker.blocks, true) },
    { name: "in use", cell: (worker) => percent((worker.blocks_used + worker.blocks_reserved) / Math.max(worker.blocks, 1)), isNumber: true },
    { name: "prompt tok/s", cell: (worker) => short(worker.prompt_tokens_per_second), isNumber: true },
    { name: "output tok/s", cell: (worker) => short(worker.output_tokens_per_second), isNumber: true },
    { name: "step", cell: (worker) => (worker.step_seconds ? duration(worker.step_seconds) : "-"), isNumber: true },
    { name: "on", cell: (worker) => `${worker.machine} ${worker.device}`.trim() || "-", isText: true },
    { name: "notes", cell: (worker) => notes(worker) || "", isText: true },
  ], view.workers, true, (worker) => worker.state === "lost" && "old"));
}

function renderSlow(view) {
  if (!view.slowest.length) return show("slow", h("p", { class: "note" }, "No request has ended in this time."));
  const chosen = view.slowest.find((trace) => trace.summary.request_id === state.chosen) || view.slowest[0];
  const choose = (id) => () => { state.chosen = id; renderSlow(state.view); };
  const rows = view.slowest.map((trace) => {
    const id = trace.summary.request_id;
    const isChosen = trace === chosen;
    return h("li", {}, h("button", { type: "button", "data-key": `slow-${id}`, "aria-current": isChosen ? "true" : null, onclick: choose(id) },
      h("span", { class: "id" }, id), h("span", { class: "n" }, duration(waited(trace)))));
  });
  const detail = h("div", { class: "lanes", role: "group", "aria-label": `Request ${chosen.summary.request_id}` },
    h("p", { class: "note" }, describe(chosen)), lanes(chosen, byId("whole").checked));
  show("slow", h("div", { class: "slow" }, h("ol", { "aria-label": "Slowest requests" }, rows), detail));
}

byId("pause").addEventListener("click", () => {
  state.isPaused = !state.isPaused;
  byId("pause").setAttribute("aria-pressed", String(state.isPaused));
  if (state.isPaused) clearTimeout(state.timer);
  else refresh();
});
byId("whole").addEventListener("change", () => state.view && renderSlow(state.view));
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key").value.trim());
  byId("key").value = "";
  refresh();
});
refresh();
