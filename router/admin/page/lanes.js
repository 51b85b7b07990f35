// Slow requests as lanes over processes: a lane per process, a bar per span.

const COLORS = {
  receive: "amber", prepare: "blue", queue: "amber", dispatch: "amber", grant_wait: "amber", prefix_read: "green", prefill_queue: "amber",
  chunk: "blue", first_token: "blue", reserve: "amber", await_offer: "grey", await_last_offer: "grey", post: "green",
  wire: "green", verify: "green", decode_queue: "amber", first_step: "blue", write: "blue", stream: "pale", gap: "red",
};
const KINDS = [
  { name: "computes", color: "blue" }, { name: "waits", color: "amber" }, { name: "waits for prefill", color: "grey" },
  { name: "KV travels", color: "green" }, { name: "streams", color: "pale" }, { name: "gap above the objective", color: "red" },
];
const NOT_DRAWN = new Set(["request"]);

function waited(trace) {
  return Math.max(trace.summary.ttft_seconds || 0, trace.summary.longest_gap_seconds);
}

function lanes(trace, isWhole) {
  const spans = trace.spans.filter((span) => !NOT_DRAWN.has(span.name) && !span.name.startsWith("attempt"));
  const untilToken = spans.filter((span) => span.name !== "stream" && span.name !== "gap").map((span) => span.begin + span.seconds);
  const gapsEnd = spans.filter((span) => span.name === "gap").map((span) => span.begin + span.seconds);
  const begun = Math.max(trace.summary.ttft_seconds || 0, ...untilToken, ...gapsEnd) * 1.04;
  const end = Math.max(isWhole ? trace.summary.seconds : Math.min(begun, trace.summary.seconds), 1e-6);
  const processes = [...new Set(trace.spans.map((span) => span.process))];
  const rows = processes.map((process) => {
    const own = spans.filter((span) => span.process === process && span.begin < end);
    const bars = own.map((span) => h("i", {
      class: `c-${COLORS[span.name] || "grey"}${span.name === "gap" ? " gap" : ""}`,
      left: `${(100 * span.begin) / end}%`,
      width: `${(100 * Math.min(span.seconds, end - span.begin)) / end}%`,
      title: `${span.name}: ${duration(span.seconds)}, from ${duration(span.begin)}`,
    }));
    return h("div", { class: "lane" }, h("span", { title: process }, process), h("div", {}, bars));
  });
  const ticks = [0, 0.25, 0.5, 0.75, 1].map((share) => h("b", { left: `${100 * share}%` }, duration(share * end)));
  const axis = h("div", { class: "lane axis", "aria-hidden": "true" }, h("span", {}), h("div", {}, ticks));
  const columns = [
    { name: "span", cell: (span) => span.name }, { name: "process", cell: (span) => span.process },
    { name: "from", cell: (span) => duration(span.begin), isNumber: true },
    { name: "takes", cell: (span) => duration(span.seconds), isNumber: true },
    { name: "tokens", cell: (span) => (span.amount ? count(span.amount) : ""), isNumber: true },
  ];
  const ordered = [...trace.spans].sort((one, other) => one.begin - other.begin);
  const used = new Set(spans.map((span) => COLORS[span.name] || "grey"));
  return [
    h("div", { role: "img", "aria-label": `Lanes of the request over ${processes.join(", ")}; the table has the same spans` }, rows, axis),
    legend(KINDS.filter((kind) => used.has(kind.color)), () => ""),
    h("details", { "data-key": "spans" }, h("summary", { "data-key": "spans-summary" }, "Spans as a table"), table("Spans of the request", columns, ordered, true)),
  ];
}

function describe(trace) {
  const of = trace.summary;
  const where = of.prefill === of.decode ? of.prefill : `${of.prefill} to ${of.decode}`;
  const parts = [
    `${of.status}${of.reason === "ok" ? "" : ` (${of.reason})`}, ${where}`,
    `${count(of.num_prompt_tokens)} prompt tokens, ${count(of.num_cached_tokens)} cached`,
    `${count(of.num_output_tokens)} output tokens`,
    of.ttft_seconds === null ? "no token" : `first token after ${duration(of.ttft_seconds)}`,
    `longest gap ${duration(of.longest_gap_seconds)}`,
    of.num_attempts > 1 ? `${of.num_attempts} attempts` : "",
  ];
  return parts.filter(Boolean).join("; ");
}
