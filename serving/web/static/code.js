// The query that is shown, as code: for the Python client, curl and grpcurl.
import { hasKey } from "./api.js";
import { announce, button, coded, h } from "./dom.js";

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`; // for a shell
const fileOf = ({ name, crop }) => (crop ? `region of ${name}` : name);

/** A value of JSON as Python writes it. */
export function python(value) {
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (value && typeof value === "object") return `{${Object.entries(value).map((each) => each.map(python).join(": ")).join(", ")}}`;
  return typeof value === "string" ? JSON.stringify(value) : { true: "True", false: "False", null: "None" }[value] ?? String(value);
}

/** The query for the Python client. `parts` are {key or photo, name, weight, crop}, `filter` is the short form. */
function forPython({ gallery, parts, request, filter, address }) {
  const model = request.model ? `, model=${python(request.model)}` : "", place = python(gallery);
  const file = (part) => `[${python(fileOf(part))}]`, single = "image" in request.queries[0] || "key" in request.queries[0];
  const options = { exclude: request.exclude_keys, k: request.k, filter, minimum_score: request.minimum_score, group_by_label: request.group_by_label,
    exclude_same: request.exclude_same, model: request.model || undefined };
  const given = Object.entries(options).filter(([, value]) => value !== undefined && value.length !== 0)
    .map(([name, value]) => `${name}=${python(value)}`);
  const [part] = parts, sent = single ? (request.queries[0].key === undefined ? `images=${file(part)}` : `keys=[${python(part.key)}]`)
    : "vectors=[mean / np.linalg.norm(mean)]";
  const vectors = parts.map((each, index) => {
    const sign = each.weight < 0 ? "- " : index ? "+ " : "", times = Math.abs(each.weight);
    const vector = each.photo || each.crop ? `client.embed(${file(each)}${model})[0]` : `client.get(${place}, ${python(each.key)}).vector`;
    return `${sign}${times === 1 ? "" : `${times} * `}${vector}`;
  });
  return [
    hasKey() ? "import os\n" : null, single ? null : "import numpy as np", "from serving.client import Client\n",
    `with Client(${python(address)}${hasKey() ? ', api_key=os.environ["API_KEY"]' : ""}) as client:`,
    single ? null : `    mean = (\n        ${vectors.join("\n        ")}\n    )`,
    `    (hits,) = client.search(\n        ${[place, sent, ...given].join(",\n        ")},\n    )`,
    "    for hit in hits:", '        print(f"{hit.score:.3f}  {hit.label}  {hit.key}")',
  ].filter((line) => line !== null).join("\n");
}

/** The query for a shell: `command` reads the request from its standard input. */
function forShell({ parts, request }, command) {
  const { image } = request.queries[0];
  const { queries, ...rest } = request;
  const text = image === undefined ? JSON.stringify(request) : `{"queries":[{"image":""}],${JSON.stringify(rest).slice(1)}`;
  if (image === undefined) return `${command} <<'END'\n${text}\nEND`;
  const [before, after] = [text.slice(0, text.indexOf('""') + 1), text.slice(text.indexOf('""') + 1)];
  return `{ printf %s ${quoted(before)}; base64 -w 0 -- ${quoted(fileOf(parts[0]))}; printf %s ${quoted(after)}; } |\n  ${command}`;
}

const header = () => (hasKey() ? ' -H "authorization: Bearer $API_KEY"' : "");
const FORMS = {
  Python: forPython,
  curl: (query) => forShell(query, `curl -sS ${quoted(`${location.origin}/v1/galleries/${query.gallery}:search`)} -H 'content-type: application/json'${header()} -d @-`),
  grpcurl: (query) => forShell({ ...query, request: { gallery: query.gallery, ...query.request } },
    `grpcurl ${location.protocol === "https:" ? "" : "-plaintext "}-max-time 10${header()} -d @ ${query.address} crossbatch.v1.RetrievalService/Search`),
};

/** The panel: {element, update(query)}. */
export function codePanel() {
  let query = null, form = "Python";
  const text = h("pre", { id: "code-text", tabindex: 0, "aria-label": "The query as code" });
  const tabs = Object.keys(FORMS).map((name) => button(name, () => { form = name; show(); }, { dataset: { form: name } }));
  const copy = button("Copy", async () => {
    await navigator.clipboard.writeText(text.textContent);
    announce("Copied.");
    copy.textContent = "Copied";
    setTimeout(() => (copy.textContent = "Copy"), 1500);
  }, { id: "copy-code" });
  const element = h("details", { id: "code-panel", hidden: true }, h("summary", {}, "As code"), h("div", { class: "tabs" }, tabs, copy), text,
    h("p", { class: "soft" }, coded("The address is that of gRPC: `--port` of the server, 50051 if it was not told otherwise.")));

  function show() {
    element.hidden = !query;
    for (const tab of tabs) tab.setAttribute("aria-pressed", tab.dataset.form === form);
    if (query) text.textContent = FORMS[form](query);
  }

  return {
    element,
    update(next) {
      query = next && { address: `${location.hostname}:50051`, ...next };
      show();
    },
  };
}
