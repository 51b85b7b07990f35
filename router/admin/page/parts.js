// Elements of the page. Texts are set as text, never as markup: names and reasons come from outside.

function h(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === false || value === undefined || value === null) continue;
    if (name === "width" || name === "left") element.style[name] = value;
    else if (name === "onclick") element.addEventListener("click", value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

// Replace what an element shows; whatever had the focus gets it back.
function show(id, ...children) {
  const element = document.getElementById(id);
  const focused = element.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  const open = new Set([...element.querySelectorAll("details[open][data-key]")].map((each) => each.dataset.key));
  const scrolled = [...element.querySelectorAll(".scroll")].map((each) => each.scrollLeft);
  element.replaceChildren(...children.flat(Infinity).filter(Boolean));
  element.querySelectorAll("details[data-key]").forEach((each) => { each.open = open.has(each.dataset.key); });
  element.querySelectorAll(".scroll").forEach((each, index) => { each.scrollLeft = scrolled[index] || 0; });
  if (focused) element.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
}

// A bar of parts {name, value, color}; `total` defaults to their sum.
function bar(label, parts, total, isThin) {
  const all = Math.max(total || parts.reduce((sum, part) => sum + part.value, 0), 1e-12);
  const shown = parts.filter((part) => part.value > 0);
  const pieces = shown.map((part) => h("i", { class: `c-${part.color}`, width: `${(100 * part.value) / all}%`, title: part.name }));
  const text = `${label}: ${shown.map((part) => `${part.name} ${percent(part.value / all)}`).join(", ") || "nothing"}`;
  return h("div", { class: isThin ? "bar thin" : "bar", role: "img", "aria-label": text }, pieces);
}

const legend = (parts, text) =>
  h("ul", { class: "legend" }, parts.map((part) => h("li", {}, h("i", { class: `c-${part.color}` }), `${part.name} `, h("b", {}, text(part)))));

// A table in a region that scrolls: `columns` are {name, cell, isNumber}; the first column names the row.
function table(caption, columns, rows, hideCaption, kindOf) {
  const head = h("tr", {}, columns.map((column) => h("th", { scope: "col", class: column.isNumber && "n" }, column.name)));
  const body = rows.map((row) =>
    h("tr", { class: kindOf && kindOf(row) }, columns.map((column, index) => {
      const content = column.cell(row);
      const kind = column.isNumber ? "n" : column.isText && "text";
      return index ? h("td", { class: kind }, content) : h("th", { scope: "row" }, content);
    })));
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption, "data-key": caption },
    h("table", {}, h("caption", { class: hideCaption && "hidden" }, caption), h("thead", {}, head), h("tbody", {}, body)));
}

// A text with commands between backticks.
const rich = (text) => text.split("`").map((part, index) => (index % 2 ? h("code", {}, part) : part));

const tag = (text, kind) => h("span", { class: `tag ${kind || ""}` }, text);

function sparkline(values) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("class", "spark");
  svg.setAttribute("viewBox", "0 0 100 26");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  const most = Math.max(...values, 1e-9);
  const step = 100 / Math.max(values.length - 1, 1);
  path.setAttribute("d", values.map((value, index) => `${index ? "L" : "M"}${(index * step).toFixed(2)} ${(24 - (22 * value) / most).toFixed(2)}`).join(""));
  svg.append(path);
  return svg;
}
