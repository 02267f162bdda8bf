// Compare: the same query in two galleries, and the queries on which they differ most.
import { base64Of, call, galleryPath, item } from "./api.js";
import { download } from "./csv.js";
import { announce, button, digits, h, notice, problem } from "./dom.js";
import { grid } from "./grid.js";
import { href, keepPhoto, keptPhoto, write } from "./state.js";

const MEANING = {
  "overlap@k": "How many of the first k results both have, divided by k.",
  "rank-biased overlap": "Agreement of the two orders, 0 to 1, where the first ranks weigh most (Webber, Moffat and Zobel, 2010): " +
    "A(k) p^k + (1 − p) / p · Σ A(d) p^d over d = 1 to k, with A(d) the shared part of the first d results and p = 0.9.",
};
let root, one, many, work = new AbortController(), listed = "";

/** The part of two lists that both have: |a ∩ b| / k, k the length of the longer one; 1 for two empty ones. */
export const overlap = (a, b) => (a.length + b.length ? a.filter((key) => b.includes(key)).length / Math.max(a.length, b.length) : 1);

/** Rank-biased overlap, extrapolated from the longer list's length on: equation 32 of Webber, Moffat and Zobel (2010). */
export function rankBiasedOverlap(a, b, p = 0.9) {
  const k = Math.max(a.length, b.length);
  let sum = 0, agreement = 1;
  for (let d = 1; d <= k; d++) {
    const first = new Set(b.slice(0, d));
    agreement = a.slice(0, d).filter((key) => first.has(key)).length / d;
    sum += agreement * p ** d;
  }
  return agreement * p ** k + ((1 - p) / p) * sum;
}

/** Search for queries {key} or {photo}: of each {hits} without the query itself, or {error}. */
async function search(gallery, queries, k, signal, with_thumbnails = false) {
  const found = [], step = queries[0].photo ? 4 : Math.min(256, Math.floor(65_536 / (k + 1)));
  for (let at = 0; at < queries.length; at += step) {
    const part = queries.slice(at, at + step);
    const sent = await Promise.all(part.map(async ({ key, photo }) => (photo ? { image: await base64Of(keptPhoto(photo)) } : { key })));
    const reply = await call("POST", galleryPath(gallery, ":search"), { queries: sent, k: k + 1, with_thumbnails }, { signal });
    found.push(...reply.results.map(({ hits = [], error }, index) => ({ error, hits: hits.filter((hit) => hit.key !== part[index].key).slice(0, k) })));
  }
  return found;
}

const keysOf = (result) => result.hits.map((hit) => hit.key);

function side(id, gallery, mine, theirs) {
  const cards = grid(mine.hits, { onPick: ({ key }) => write({ key, photo: null }), pick: "Compare by this" });
  [...cards.children].forEach((card, rank) => {
    const twin = theirs.hits.findIndex((hit) => hit.key === card.item.key);
    card.classList.add(twin < 0 ? "alone" : "both");
    if (twin >= 0) card.style.setProperty("--twin", `var(--s${Math.min(rank, twin) % 8})`);
    card.prepend(h("span", { class: "twin" }, twin < 0 ? `${rank + 1}, only here` : `${rank + 1} here, ${twin + 1} there`));
  });
  cards.addEventListener("pointerover", ({ target }) => light(target.closest(".card")?.dataset.key));
  const body = mine.hits.length ? cards : notice("Nothing found", [mine.error?.message ?? "The gallery has no other item."]);
  return h("section", { id, "aria-label": gallery }, h("h2", {}, gallery), mine.failed ? problem(mine.failed) : body);
}

function light(key) {
  for (const card of root.querySelectorAll("#compare-left .card, #compare-right .card")) card.classList.toggle("lit", card.dataset.key === key);
}

async function pair(place, { gallery, other, key, photo }, k, signal) {
  if (photo && !keptPhoto(photo)) return place.replaceChildren(notice("The photo is not here any more", ["A photo is kept until the page is closed. Choose it again."]));
  const sides = await Promise.all([gallery, other].map((each) => search(each, [{ key, photo }], k, signal, true).then(([result]) => result, (failed) => {
    if (failed.name === "AbortError") throw failed;
    return { hits: [], failed };
  })));
  const [left, right] = sides.map(keysOf);
  const told = `${left.filter((each) => right.includes(each)).length} results shared, overlap@${k} ${digits(overlap(left, right))}, ` +
    `rank-biased overlap ${digits(rankBiasedOverlap(left, right))}`;
  const query = photo ? null : await item(gallery, key, { signal }).catch(() => null);
  const shown = query ? grid([query], { onPick: () => write({ view: "search" }) }) : h("b", {}, photo ? keptPhoto(photo).name : key);
  place.replaceChildren(h("div", { class: "compared" }, shown, h("p", { title: Object.values(MEANING).join("\n") }, sides.some((each) => each.failed) ? null : told)),
    h("div", { class: "sides" }, side("compare-left", gallery, ...sides), side("compare-right", other, ...sides.toReversed())));
  announce(told);
}

async function measure(place, { gallery, other, list }, k, signal) {
  const [way, ...rest] = JSON.parse(list);
  place.replaceChildren(h("p", { class: "soft", role: "status" }, "Searching both galleries for each query…"));
  let queries = rest.map((each) => ({ [way]: each }));
  if (way === "random") {
    const reply = await call("POST", galleryPath(gallery, "/items:sample"), { size: rest[0], seed: rest[1] }, { signal });
    queries = (reply.items ?? []).map(({ key }) => ({ key }));
  }
  const [lefts, rights] = await Promise.all([gallery, other].map((each) => search(each, queries, k, signal)));
  const rows = queries.map((query, at) => {
    const [left, right] = [lefts[at], rights[at]], error = left.error ?? right.error;
    const measured = error ? {} : { overlap: overlap(keysOf(left), keysOf(right)), order: rankBiasedOverlap(keysOf(left), keysOf(right)) };
    return { ...query, name: query.key ?? keptPhoto(query.photo).name, error: error?.message, ...measured };
  }).sort((a, b) => (a.order ?? 2) - (b.order ?? 2));
  const line = ({ name, key, photo, error, ...of }) => h("tr", {},
    h("th", { scope: "row" }, h("a", { href: href({ key: key ?? null, photo: photo ?? null }) }, name)),
    error ? h("td", { colspan: 2 }, error) : [h("td", {}, digits(of.overlap)), h("td", {}, digits(of.order))]);
  const file = [["query", `overlap@${k}`, "rank-biased overlap"], ...rows.map((each) => [each.name, each.overlap ?? "", each.order ?? ""])];
  place.replaceChildren(h("table", { id: "compare-table" },
    h("caption", {}, `${rows.length} queries, those on which ${gallery} and ${other} differ most first`),
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Query"), Object.entries(MEANING).map(([name, title]) => h("th", { scope: "col" }, h("abbr", { title }, name.replace("@k", `@${k}`)))))),
    h("tbody", {}, rows.map(line))),
  button("Export as CSV", () => download(`compare-${gallery}-${other}.csv`, file), { id: "export-comparison" }));
}

/** Photos become queries, and the lines of a text keys. */
async function take(files) {
  const photos = files.filter((file) => !file.type.startsWith("text/")).map(keepPhoto);
  const texts = await Promise.all(files.filter((file) => file.type.startsWith("text/")).map((file) => file.text()));
  const keys = texts.join("\n").split(/\r?\n/).filter(Boolean).slice(0, 1000);
  if (photos.length === 1 && !keys.length) write({ photo: photos[0], key: null });
  else if (photos.length + keys.length) write({ list: JSON.stringify(keys.length ? ["key", ...keys] : ["photo", ...photos]) });
}

function controls(state, galleries) {
  const { gallery, other, k = 12 } = state, rest = galleries.filter(({ name }) => name !== gallery);
  const chooser = h("select", { id: "other-select", on: { change: () => write({ other: chooser.value }) } }, rest.map(({ name }) => h("option", { selected: name === other }, name)));
  const depth = h("input", { type: "number", min: 1, max: 100, value: k, on: { change: () => write({ k: Math.max(1, Math.min(100, Math.round(depth.value) || 12)) }) } });
  const key = h("input", { id: "compare-key", value: state.key ?? "", autocomplete: "off", placeholder: "key of an item" });
  const files = h("input", { type: "file", multiple: true, accept: "image/*,text/plain,.txt", class: "unseen", on: { change: () => take([...files.files]) } });
  const draw = () => write({ list: JSON.stringify(["random", 50, 1 + Math.floor(Math.random() * 2 ** 31)]) });
  const submit = (event) => { event.preventDefault(); write({ key: key.value, photo: null }); };
  return h("form", { class: "bar", on: { submit } }, h("label", {}, `${gallery} beside`, chooser), h("label", {}, "Results", depth),
    h("label", {}, "Query", key), h("button", { class: "primary" }, "Compare"),
    h("label", { class: "button" }, "Photos, or a text of keys", files), button("50 random queries", draw, { id: "compare-random" }));
}

export default {
  name: "compare",
  title: "Compare",
  take,
  mount(place) {
    root = place;
    [one, many, listed] = [h("div"), h("div"), ""];
  },
  update(state, { galleries }) {
    work.abort();
    work = new AbortController();
    const others = galleries.filter(({ name, problem: fault }) => name !== state.gallery && !fault).map(({ name }) => name);
    if (!others.length) return root.replaceChildren(notice("There is nothing to compare with", ["Index the same pictures with another model, or another way, as a second gallery:",
      h("code", { class: "block" }, "crossbatch index --model OTHER.onnx --data FOLDER --thumbnails --galleries GALLERIES OTHER"), "Items are the same where their keys are."]));
    if (!others.includes(state.other)) return write({ other: others[0] }, { replace: true });
    const k = Math.max(1, Math.min(100, Math.round(state.k) || 12)), asked = JSON.stringify([state.gallery, state.other, k, state.list]);
    const run = (place, fill) => {
      place.setAttribute("aria-busy", "true");
      fill(place, state, k, work.signal).catch((error) => error.name === "AbortError" || place.replaceChildren(problem(error))).finally(() => place.removeAttribute("aria-busy"));
    };
    root.replaceChildren(controls(state, galleries), one, many);
    if (state.key || state.photo) run(one, pair);
    else one.replaceChildren(notice("Choose a query", ["Type the key of an item, choose or drop a photo, or let 50 random queries show where the two differ."]));
    if (!state.list) many.replaceChildren();
    else if (asked !== listed) run(many, measure);
    listed = asked;
  },
  unmount: () => work.abort(),
};
